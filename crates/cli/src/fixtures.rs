//! Listings for tests.

use ebb_protocol::control::{ArenaRow, DeviceRow, ProcessRow, Snapshot, StrangerRow, TaskRow, Totals};
use ebb_units::{Bytes, DeviceUuid, Priority, TaskId};

/// Two tasks that share a card which is too small for both, and one that only began.
pub(crate) fn busy() -> Snapshot {
    let card = DeviceUuid([7; 16]);
    let process = |pid, state: &str, why: &str, resident, evicted| ProcessRow {
        pid,
        program: "python3".into(),
        device: Some(card),
        state: state.into(),
        why: why.into(),
        since_ms: 2_500,
        allocated: Bytes::gib(100),
        resident: Bytes(resident),
        evicted: Bytes(evicted),
        lodged: Bytes::ZERO,
        on_disk: Bytes::ZERO,
        cached: Bytes::mib(64),
        managed: Bytes::ZERO,
        managed_out: Bytes::ZERO,
        pinned: Bytes::ZERO,
        overhead: Bytes::mib(527),
        unseen: Bytes::ZERO,
        lease: Bytes(resident),
        releases: 3,
        restores: 2,
    };
    let task = |id, name: &str, priority, limit, processes| TaskRow {
        task: TaskId(id),
        name: name.into(),
        priority,
        request: Bytes::gib(20),
        limit,
        paused: false,
        hibernation: None,
        processes,
    };
    Snapshot {
        uptime_ms: 400_000,
        devices: vec![DeviceRow {
            uuid: card,
            index: 0,
            name: "NVIDIA H200".into(),
            total: Bytes::mib(143_771),
            capacity: Bytes::mib(143_000),
            leased: Bytes::gib(120),
            overhead: Bytes::mib(1054),
            unmanaged: Bytes::gib(2),
            lodged: Bytes::ZERO,
            free: Bytes::mib(143_000) - Bytes::gib(122) - Bytes::mib(1054),
            peak: Bytes::gib(130),
            strangers: vec![StrangerRow {
                pid: 977,
                program: "render\u{1b}[31mer".into(),
                task: Some(TaskId(3)),
                bytes: Bytes::gib(2),
                why: "a static program: nothing can be preloaded into it".into(),
            }],
        }],
        tasks: vec![
            task(
                1,
                "train",
                Priority::High,
                Some(Bytes::gib(110)),
                vec![process(4711, "active", "", 100 << 30, 0)],
            ),
            task(
                2,
                "note\u{1b}[31mbook",
                Priority::Normal,
                None,
                vec![
                    process(
                        4712,
                        "waiting",
                        "waits for 80 GiB; task t1 has its turn",
                        20 << 30,
                        80 << 30,
                    ),
                    process(4713, "idle", "", 1 << 30, 0),
                ],
            ),
            task(3, "begins", Priority::Low, None, vec![]),
        ],
        arena: ArenaRow {
            common: Bytes::ZERO,
            spared: Bytes::ZERO,
            budget: Bytes::gib(256),
            held: Bytes::gib(96),
            lent: Bytes::gib(80),
            disk: None,
        },
        totals: Totals {
            releases: 5,
            restores: 4,
            out_bytes: Bytes::gib(400),
            out_nanos: 8_000_000_000,
            in_bytes: Bytes::gib(320),
            in_nanos: 6_500_000_000,
            denials: 1,
        },
    }
}
