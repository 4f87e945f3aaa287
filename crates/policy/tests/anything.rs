//! Any events in any order: nothing panics, no sum goes wrong, nothing is granted that was not asked for.

mod common;

use std::collections::BTreeMap;

use common::config;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};
use proptest::prelude::*;

fn bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        6 => (0u64..40).prop_map(Bytes::gib),
        1 => Just(Bytes::ZERO),
        1 => Just(Bytes(1)),
        1 => Just(Bytes::MAX),
        1 => any::<u64>().prop_map(Bytes),
    ]
}

fn nanos() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..10_000_000_000, Just(0), Just(u64::MAX)]
}

fn task() -> impl Strategy<Value = TaskId> {
    (1u64..5).prop_map(TaskId)
}

fn client() -> impl Strategy<Value = ClientId> {
    (1u64..7).prop_map(ClientId)
}

fn device() -> impl Strategy<Value = DeviceId> {
    prop_oneof![4 => Just(DeviceId(0)), 1 => (0u32..3).prop_map(DeviceId)]
}

/// Orders are numbered from one on: these often hit.
fn order() -> impl Strategy<Value = OrderId> {
    (1u64..30).prop_map(OrderId)
}

fn ask() -> impl Strategy<Value = AskId> {
    (0u64..40).prop_map(AskId)
}

prop_compose! {
    fn spec()(
        request in prop_oneof![Just(Bytes::ZERO), (0u64..60).prop_map(Bytes::gib), bytes()],
        limit in prop::option::of(bytes()),
        priority in prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)],
        release in prop::option::of((0u64..20_000).prop_map(std::time::Duration::from_millis)),
    ) -> TaskSpec {
        TaskSpec { request, limit, priority, idle_release: release, tenant: Tenant(u32::try_from(request.0 % 3).unwrap()) }
    }
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        Just(Outcome::Done),
        Just(Outcome::Busy),
        Just(Outcome::Failed),
        Just(Outcome::NothingLeft),
        Just(Outcome::NoRoom)
    ]
}

fn usage() -> impl Strategy<Value = Usage> {
    let figures = (bytes(), bytes(), bytes(), bytes(), bytes(), bytes(), bytes());
    figures.prop_map(
        |(resident, cached, evicted, pinned, overhead, loose, clean)| Usage {
            resident,
            cached,
            evicted,
            pinned,
            overhead,
            loose,
            clean,
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (device(), bytes(), bytes())
            .prop_map(|(device, capacity, unmanaged)| Event::Device { device, capacity, unmanaged }),
        3 => (task(), spec(), prop::collection::vec(device(), 0..2), any::<bool>())
            .prop_map(|(task, spec, devices, adopt)| Event::TaskAdded { task, spec, devices, adopt }),
        1 => (task(), spec(), any::<bool>()).prop_map(|(task, spec, force)| Event::TaskChanged { task, spec, force }),
        1 => task().prop_map(|task| Event::TaskRemoved { task }),
        5 => (client(), task(), device(), bytes(), bytes(), bytes()).prop_map(
            |(client, task, device, lease, evicted, overhead)| Event::ClientJoined {
                client, task, device, lease, evicted, overhead
            }
        ),
        1 => (client(), bytes()).prop_map(|(client, kept)| Event::ClientLeft { client, kept }),
        12 => (client(), ask(), any::<bool>(), bytes(), any::<bool>()).prop_map(|(client, ask, alloc, bytes, long)| {
            Event::Ask { client, ask, kind: if alloc { AskKind::Alloc } else { AskKind::Restore }, bytes, long }
        }),
        2 => (client(), ask()).prop_map(|(client, ask)| Event::AskCancelled { client, ask }),
        2 => (client(), bytes()).prop_map(|(client, bytes)| Event::Returned { client, bytes }),
        1 => (client(), client(), any::<bool>(), bytes()).prop_map(|(client, other, known, bytes)| {
            Event::Inherited { client, from: (known && other != client).then_some(other), bytes }
        }),
        1 => (client(), bytes()).prop_map(|(client, bytes)| Event::BecameOverhead { client, bytes }),
        3 => (client(), usage()).prop_map(|(client, usage)| Event::Usage { client, usage }),
        5 => client().prop_map(|client| Event::Touched { client }),
        8 => (client(), order(), bytes())
            .prop_map(|(client, order, bytes)| Event::ReclaimProgress { client, order, bytes }),
        8 => (client(), order(), outcome(), bytes(), nanos()).prop_map(|(client, order, outcome, copied, nanos)| {
            Event::ReclaimDone { client, order, outcome, copied, nanos }
        }),
        2 => (client(), bytes(), nanos())
            .prop_map(|(client, copied, nanos)| Event::Restored { client, copied, nanos }),
        3 => (client(), prop::collection::vec(device(), 0..3), bytes(), bytes())
            .prop_map(|(client, lenders, bytes, most)| Event::LodgingAsked { client, lenders, bytes, most }),
        2 => (client(), device(), bytes()).prop_map(|(client, lender, bytes)| Event::LodgingLeft { client, lender, bytes }),
        1 => (client(), prop::collection::vec((device(), bytes()), 0..3))
            .prop_map(|(client, held)| Event::LodgingHeld { client, held }),
        1 => task().prop_map(|task| Event::Pause { task }),
        1 => task().prop_map(|task| Event::Resume { task }),
        3 => Just(Event::Tick),
    ]
}

fn later() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..300_000_000, 2 => 0u64..30_000_000_000, 1 => Just(0)]
}

/// A machine with something on it: otherwise most events would name what is not there.
fn beginning() -> Vec<Event> {
    let mut events = vec![Event::Device {
        device: DeviceId(0),
        capacity: Bytes::gib(100),
        unmanaged: Bytes::ZERO,
    }];
    for n in 1..4 {
        events.push(Event::TaskAdded {
            task: TaskId(n),
            spec: TaskSpec::default(),
            devices: vec![],
            adopt: false,
        });
        events.push(Event::ClientJoined {
            client: ClientId(n),
            task: TaskId(n),
            device: DeviceId(0),
            lease: Bytes::gib(20),
            evicted: Bytes::gib(5),
            overhead: Bytes::ZERO,
        });
    }
    events
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]


    #[test]
    fn no_events_in_any_order_do_harm(
        events in prop::collection::vec((event(), later()), 0..120),
        back in 0u64..3,
        predict: bool,
    ) {
        let mut arbiter = Arbiter::new(PolicyConfig { predict, ..config() });
        let mut now = Time(0);
        let mut open: BTreeMap<(ClientId, AskId), Bytes> = BTreeMap::new();
        let start = beginning().into_iter().map(|e| (e, 0));
        for (event, wait) in start.chain(events) {
            // Clocks of a bad driver may even go back a little.
            now = Time((now.0 + wait).saturating_sub(back));
            if let Event::Ask { client, ask, bytes, .. } = event {
                open.entry((client, ask)).or_insert(bytes);
            }
            let actions = arbiter.handle(now, &event);
            prop_assert_eq!(arbiter.check(), Ok(()));
            for action in &actions {
                match action {
                    Action::Grant { client, ask, bytes, complete } => {
                        let left = open.get_mut(&(*client, *ask)).expect("an open ask");
                        prop_assert!(*bytes <= *left);
                        *left -= *bytes;
                        prop_assert_eq!(*complete, left.is_zero());
                        if *complete {
                            open.remove(&(*client, *ask));
                        }
                    }
                    Action::Deny { client, ask, .. } => {
                        prop_assert!(open.remove(&(*client, *ask)).is_some());
                    }
                    Action::Reclaim { client, bytes, .. } => {
                        prop_assert!(!bytes.is_zero());
                        let has = |c: &ClientView| c.client == *client && !(c.lease.is_zero() && c.overhead.is_zero());
                        let tasks = arbiter.snapshot().tasks;
                        prop_assert!(tasks.iter().flat_map(|t| &t.clients).any(has));
                    }
                    Action::LodgingLent { lender, bytes, .. } => {
                        let Event::LodgingAsked { bytes: asked, lenders, .. } = &event else {
                            panic!("nobody asked");
                        };
                        prop_assert!(bytes <= asked);
                        prop_assert!(lender.is_none_or(|lender| lenders.contains(&lender)));
                    }
                    Action::LodgingWanted { client, lender, bytes } => {
                        let there = arbiter.lodged(*client).find(|(device, _)| device == lender);
                        prop_assert!(!bytes.is_zero() && there.is_some_and(|(_, has)| *bytes <= has));
                    }
                    _ => {}
                }
            }
            if let Event::AskCancelled { client, ask } = event {
                open.remove(&(client, ask));
            }
            if let Event::ClientLeft { client, .. } = event {
                open.retain(|(c, _), _| *c != client);
            }
            open.retain(|(c, _), _| arbiter.lease(*c).is_some());
            if let Some(next) = arbiter.next_deadline() {
                prop_assert!(next > now);
            }
            let view = arbiter.snapshot();
            for d in &view.devices {
                prop_assert!(d.free <= d.capacity);
            }
        }
    }
}

#[cfg(feature = "serde")]
proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    /// What is in the event log is what happened.
    #[test]
    fn events_and_actions_read_back(events in prop::collection::vec(event(), 1..40)) {
        let mut arbiter = Arbiter::new(config());
        for event in beginning().into_iter().chain(events) {
            let text = serde_json::to_string(&event).unwrap();
            let again: Event = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&again, &event);
            for action in arbiter.handle(Time(0), &event) {
                let text = serde_json::to_string(&action).unwrap();
                prop_assert_eq!(serde_json::from_str::<Action>(&text).unwrap(), action);
            }
        }
    }
}
