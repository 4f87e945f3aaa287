//! Room on one card for what another evicts, as the daemon lends it and takes it back.

use ebb_node::test_util::{CARD, Client, TestDaemon};
use ebb_protocol::control::Snapshot;
use ebb_protocol::wire::{LodgedAt, feature};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::{Bytes, DeviceUuid};

const TOTAL: Bytes = Bytes::mib(1024);
/// The card that lends.
const LENDER: DeviceUuid = DeviceUuid(*b"another test car");

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap()
}

/// Attaches to the card that lends; the slot.
fn attach_lender(client: &mut Client) -> u32 {
    client.send(&ToDaemon::Attach {
        device: LENDER,
        total: TOTAL,
        granularity: ebb_units::GRANULE,
        lease: Bytes::ZERO,
        evicted: Bytes::ZERO,
        overhead: Bytes::ZERO,
    });
    match client.answer() {
        ToLayer::Attached {
            uuid: LENDER, device, ..
        } => device,
        other => panic!("not attached: {other:?}"),
    }
}

/// Asks for lease on a card.
fn ask_on(client: &Client, device: u32, ask: u64, bytes: Bytes) {
    client.send(&ToDaemon::Ask {
        device,
        ask,
        kind: ebb_protocol::wire::ask_kind::ALLOC,
        bytes,
        long: true,
    });
}

/// On the first card, with the other one in reach; its slot.
fn borrower(client: &mut Client) -> u32 {
    let (device, ..) = client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    client.send(&ToDaemon::LodgingLenders {
        device,
        lenders: vec![CARD, LENDER, DeviceUuid([9; 16])],
    });
    device
}

fn lodge(client: &mut Client, device: u32, bytes: Bytes) -> Bytes {
    client.send(&ToDaemon::LodgingAsk { device, bytes });
    match client.answer() {
        ToLayer::LodgingLent {
            device: of,
            lender,
            bytes,
        } => {
            assert_eq!(of, device);
            let nobody = DeviceUuid([0; 16]);
            assert_eq!(lender, if bytes.is_zero() { nobody } else { LENDER });
            bytes
        }
        other => panic!("no answer: {other:?}"),
    }
}

fn lent(snapshot: &Snapshot) -> Bytes {
    snapshot.devices.iter().map(|device| device.lodged).sum()
}

#[test]
fn room_is_lent_and_wanted_back_and_a_killed_borrower_leaves_none() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[event_log]\nenabled = true");
    let mut owner = daemon.client(daemon.task("owner", Bytes::ZERO, None));
    let there = attach_lender(&mut owner);
    let mut guest = daemon.process(daemon.task("guest", Bytes::ZERO, None));
    let home = borrower(&mut guest);
    assert_eq!(lodge(&mut guest, home, Bytes::mib(600)), Bytes::mib(600));
    daemon.until("it shows", |s| lent(s) == Bytes::mib(600));
    // The owner needs more than is left: exactly that comes back, and it is granted as soon as it has.
    ask_on(&owner, there, 1, Bytes::mib(700));
    match guest.answer() {
        ToLayer::LodgingWanted {
            device,
            lender: LENDER,
            bytes,
        } => {
            assert_eq!(device, home);
            assert!(bytes >= Bytes::mib(276) && bytes < Bytes::mib(300), "{bytes}");
            let left = |bytes| ToDaemon::LodgingLeft {
                device: home,
                lender: LENDER,
                bytes,
            };
            guest.send(&left(Bytes::mib(100)));
            guest.send(&left(bytes - Bytes::mib(100)));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(owner.answer(), ToLayer::Grant { ask: 1, .. }));
    let snapshot = daemon.until("the rest is lent still", |s| !lent(s).is_zero());
    assert_eq!(
        lodge(&mut guest, home, Bytes::mib(600)),
        Bytes::ZERO,
        "nothing is spare"
    );
    assert!(snapshot.devices.iter().all(|d| d.unmanaged.is_zero()));
    guest.kill();
    daemon.until("a dead borrower has nothing", |s| lent(s).is_zero());
    ask_on(&owner, there, 2, Bytes::mib(300));
    assert!(matches!(owner.answer(), ToLayer::Grant { ask: 2, .. }));
}

#[test]
fn a_new_daemon_hears_of_lent_room_before_it_lends_any() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("guest", Bytes::ZERO, None);
    let mut owner = daemon.client(daemon.task("owner", Bytes::ZERO, None));
    attach_lender(&mut owner);
    let mut guest = daemon.client(token);
    let home = borrower(&mut guest);
    assert_eq!(lodge(&mut guest, home, Bytes::mib(500)), Bytes::mib(500));
    drop((owner, guest));
    daemon.stop();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut owner = daemon.client([0; 32]);
    let there = attach_lender(&mut owner);
    let mut guest = daemon.client(token);
    let home = borrower(&mut guest);
    guest.send(&ToDaemon::LodgingHeld {
        device: home,
        held: vec![LodgedAt {
            lender: LENDER,
            bytes: Bytes::mib(500),
        }],
    });
    daemon.until("it is in the books", |s| lent(s) == Bytes::mib(500));
    ask_on(&owner, there, 1, Bytes::mib(900));
    assert!(matches!(guest.answer(), ToLayer::LodgingWanted { .. }));
    // What a process does not name, it does not have.
    guest.send(&ToDaemon::LodgingHeld {
        device: home,
        held: Vec::new(),
    });
    assert!(matches!(owner.answer(), ToLayer::Grant { ask: 1, .. }));
}

#[test]
fn the_operator_decides() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[peer]\nlimit = \"100Mi\"");
    let mut guest = daemon.client([0; 32]);
    attach_lender(&mut guest);
    let home = borrower(&mut guest);
    assert_eq!(lodge(&mut guest, home, Bytes::mib(500)), Bytes::mib(100));
    daemon.stop();
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[peer]\nenabled = false");
    let mut guest = daemon.client([0; 32]);
    attach_lender(&mut guest);
    let home = borrower(&mut guest);
    assert_eq!(lodge(&mut guest, home, Bytes::mib(500)), Bytes::ZERO);
    assert_eq!(feature::LODGING, 4, "what libraries of this version look at");
}
