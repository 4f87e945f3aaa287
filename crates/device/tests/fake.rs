//! The fake keeps the promises of the trait, and tells its lies on order.

use std::sync::Arc;

use ebb_device::conformance::{self, Host, pattern};
use ebb_device::fake::{Call, Card, FakeDevice, FakeHost};
use ebb_device::{DeviceError, DeviceMemory, Direction, HostAddr};

const G: u64 = 4096;

#[derive(Debug)]
struct TestHost(Arc<FakeHost>);

impl Host for TestHost {
    fn memory(&self, len: u64) -> HostAddr {
        self.0.segment(len)
    }
    fn fill(&self, at: HostAddr, len: u64, seed: u8) {
        self.0
            .bytes(at, len, |bytes| {
                (0u64..).zip(bytes).for_each(|(i, byte)| *byte = pattern(seed, i));
            })
            .unwrap();
    }
    fn holds(&self, at: HostAddr, len: u64, seed: u8) -> bool {
        self.0
            .bytes(at, len, |bytes| {
                (0u64..).zip(bytes).all(|(i, byte)| *byte == pattern(seed, i))
            })
            .unwrap()
    }
}

fn device(capacity: u64) -> (Arc<FakeDevice>, Arc<FakeHost>, Card) {
    let host = Arc::new(FakeHost::default());
    let card = Card::new(capacity);
    (
        Arc::new(FakeDevice::new(card.clone(), host.clone(), G)),
        host,
        card,
    )
}

#[test]
fn the_fake_conforms() {
    let (fake, host, card) = device(2048 * G);
    let dynamic: Arc<dyn DeviceMemory> = fake.clone();
    conformance::run(&dynamic, &TestHost(host), 2048 * G, true);
    assert_eq!(
        (fake.handles(), fake.mapped(), fake.reserved(), card.used()),
        (0, 0, 0, 0)
    );
    // The suite misuses it on purpose three times.
    assert_eq!(fake.violations().len(), 3, "{:?}", fake.violations());
}

#[test]
fn a_card_is_shared_and_a_dropped_device_gives_all_back() {
    let (a, host, card) = device(4 * G);
    let b = FakeDevice::new(card.clone(), host, G);
    a.create(3 * G).unwrap();
    assert_eq!(b.create(2 * G), Err(DeviceError::OutOfMemory));
    drop(a);
    b.create(2 * G).unwrap();
    assert_eq!((card.used(), card.peak()), (2 * G, 3 * G));
}

#[test]
fn memory_released_before_its_copy_was_waited_for_is_lost_and_noticed() {
    let (fake, host, _) = device(4 * G);
    let at = fake.reserve(G, G).unwrap();
    let handle = fake.create(G).unwrap();
    fake.map(at, G, handle).unwrap();
    fake.set_access(at, G).unwrap();
    fake.copy_out(host.segment(G), at, G).unwrap();
    let marker = fake.mark(Direction::Out).unwrap();
    fake.unmap(at, G).unwrap();
    assert!(fake.wait(marker).is_err());
    assert_eq!(fake.violations().len(), 1);
}

#[test]
fn failures_come_when_ordered() {
    let (fake, _, _) = device(4 * G);
    let error = DeviceError::Driver {
        code: 999,
        call: "cuMemCreate",
    };
    fake.fail_nth(Call::Create, 2, error);
    let first = fake.create(G).unwrap();
    assert_eq!(fake.create(G), Err(error));
    fake.create(G).unwrap();
    fake.fail_kth(2, error);
    fake.release(first).unwrap();
    assert_eq!(fake.quiesce(), Err(error));
    assert!(!fake.fault_pending());
    fake.fail_always(Call::Reserve, error);
    assert_eq!(fake.reserve(G, G), Err(error));
    assert_eq!(fake.reserve(G, G), Err(error));
    fake.heal();
    fake.reserve(G, G).unwrap();
    fake.kill();
    assert_eq!(fake.create(G), Err(DeviceError::Gone));
}

#[test]
fn quiesce_waits_for_the_programs_work() {
    let (fake, _, _) = device(G);
    fake.begin_work();
    let waiter = std::thread::spawn({
        let fake = fake.clone();
        move || fake.quiesce()
    });
    while fake.calls(Call::Quiesce) == 0 {
        std::thread::yield_now();
    }
    assert!(!waiter.is_finished());
    fake.end_work();
    waiter.join().unwrap().unwrap();
}
