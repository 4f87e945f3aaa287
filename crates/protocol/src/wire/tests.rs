//! Every message arrives as it was sent, and nothing else does.

use super::*;
use proptest::prelude::*;

fn segments() -> impl Strategy<Value = Vec<SegmentInfo>> {
    prop::collection::vec(
        (any::<u64>(), any::<u64>()).prop_map(|(id, b)| SegmentInfo { id, bytes: Bytes(b) }),
        0..16,
    )
}

fn held() -> impl Strategy<Value = HeldShare> {
    (any::<[u64; 3]>(), any::<[u8; 16]>(), any::<bool>()).prop_map(
        |([hold, block, bytes], name, inherited)| HeldShare {
            hold,
            name,
            device: DeviceUuid(name),
            block,
            bytes: Bytes(bytes),
            inherited,
        },
    )
}

fn to_daemon() -> impl Strategy<Value = ToDaemon> {
    prop_oneof![
        (any::<u32>(), any::<[u8; 32]>(), any::<u64>()).prop_map(|(pid, token, resumes)| {
            ToDaemon::Hello {
                pid,
                token,
                program: [7; 64],
                resumes,
            }
        }),
        (
            any::<u32>(),
            any::<u64>(),
            any::<u32>(),
            any::<u64>(),
            any::<bool>()
        )
            .prop_map(|(device, ask, kind, bytes, long)| ToDaemon::Ask {
                device,
                ask,
                kind,
                bytes: Bytes(bytes),
                long
            }),
        segments().prop_map(|segments| ToDaemon::ArenaDeclare { segments }),
        prop::collection::vec(any::<u64>(), 0..200).prop_map(|segments| ToDaemon::ArenaReturn { segments }),
        (any::<u64>(), prop::collection::vec(any::<u8>(), 0..4000))
            .prop_map(|(query, text)| ToDaemon::Report { query, text }),
        (any::<[u8; 32]>(), any::<[u8; 16]>()).prop_map(|(token, device)| ToDaemon::AskWorld {
            token,
            device: DeviceUuid(device)
        }),
        any::<[u8; 16]>().prop_map(|device| ToDaemon::AskHeld {
            device: DeviceUuid(device)
        }),
        (any::<[u8; 16]>(), prop::collection::vec(any::<u64>(), 0..9))
            .prop_map(|(name, lent)| ToDaemon::ShareName { name, lent }),
        (prop::collection::vec(held(), 0..9), any::<bool>())
            .prop_map(|(holds, all)| ToDaemon::ShareHeld { holds, all }),
        (
            any::<u64>(),
            any::<u32>(),
            prop::collection::vec(any::<u8>(), 0..400)
        )
            .prop_map(|(order, outcome, text)| ToDaemon::SleepAnswer { order, outcome, text }),
        any::<u64>().prop_map(|order| ToDaemon::WakeMe { order }),
        (any::<u32>(), prop::collection::vec(any::<[u8; 16]>(), 0..9)).prop_map(|(device, lenders)| {
            ToDaemon::LodgingLenders {
                device,
                lenders: lenders.into_iter().map(DeviceUuid).collect(),
            }
        }),
        (
            any::<u32>(),
            prop::collection::vec((any::<[u8; 16]>(), any::<u64>()), 0..9)
        )
            .prop_map(|(device, held)| {
                let at = |(lender, bytes)| LodgedAt {
                    lender: DeviceUuid(lender),
                    bytes: Bytes(bytes),
                };
                ToDaemon::LodgingHeld {
                    device,
                    held: held.into_iter().map(at).collect(),
                }
            }),
        any::<u64>().prop_map(|order| ToDaemon::Sleeping { order }),
        (any::<u64>(), prop::collection::vec(any::<[u64; 3]>(), 0..9)).prop_map(|(notice, runs)| {
            let run = |[segment, offset, bytes]: [u64; 3]| RestingRun {
                segment,
                offset,
                bytes: Bytes(bytes),
            };
            ToDaemon::ArenaRest {
                notice,
                runs: runs.into_iter().map(run).collect(),
            }
        }),
        (any::<u64>(), any::<bool>()).prop_map(|(segment, held)| ToDaemon::ArenaCommonHeld { segment, held }),
        (segments(), any::<bool>())
            .prop_map(|(segments, first)| ToDaemon::ArenaCommonDeclare { segments, first }),
        (any::<u64>(), any::<[u8; 32]>(), any::<u32>()).prop_map(|(hold, half, from)| {
            let mut handle = [0; share::HANDLE];
            handle[16..48].copy_from_slice(&half);
            ToDaemon::ShareOpen { hold, handle, from }
        }),
        (
            any::<[u64; 5]>(),
            any::<[u32; 4]>(),
            prop::collection::vec(any::<u64>(), 0..16)
        )
            .prop_map(
                |([hold, block, bytes, offset, size], [status, device, from, count], chunks)| {
                    ToDaemon::ShareGive {
                        hold,
                        status,
                        device,
                        block,
                        bytes: Bytes(bytes),
                        offset: Bytes(offset),
                        size: Bytes(size),
                        from,
                        count,
                        chunks: chunks.into_iter().map(Bytes).collect(),
                    }
                }
            ),
    ]
}

proptest! {
    #[test]
    fn what_is_sent_arrives(message in to_daemon()) {
        let packet = message.encode().unwrap();
        prop_assert_eq!(ToDaemon::decode(&packet), Ok(message));
    }

    #[test]
    fn every_cut_is_noticed(message in to_daemon(), cut in any::<prop::sample::Index>()) {
        let packet = message.encode().unwrap();
        let cut = cut.index(packet.len());
        prop_assert!(matches!(ToDaemon::decode(&packet[..cut]), Err(WireError::Short(_))));
    }

    #[test]
    fn arbitrary_bytes_never_panic_or_allocate_much(mut bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u16..100) {
        let _ = ToDaemon::decode(&bytes);
        if bytes.len() >= HEADER {
            let length = u32::try_from(bytes.len() - HEADER).unwrap();
            bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[4..6].copy_from_slice(&kind.to_le_bytes());
            bytes[6..8].copy_from_slice(&VERSION.to_le_bytes());
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            let _ = ToDaemon::decode(&bytes);
            let _ = ToLayer::decode(&bytes);
        }
    }
}

#[test]
fn a_world_arrives_and_a_cut_one_does_not() {
    let process = |pid| WorldProcess {
        pid,
        seen_pid: pid + 1000,
        bytes: Bytes::mib(pid.into()),
    };
    let world = ToLayer::World {
        device: DeviceUuid([3; 16]),
        known: true,
        limit: Bytes(9),
        charged: Bytes(8),
        processes: vec![process(1), process(2)],
    };
    let packet = world.encode().unwrap();
    assert_eq!(ToLayer::decode(&packet).as_ref(), Ok(&world));
    for cut in 0..packet.len() {
        assert!(ToLayer::decode(&packet[..cut]).is_err());
    }
}

#[test]
fn common_blocks_arrive_and_cut_ones_do_not() {
    let block = |n: u64| CommonBlock {
        segment: n,
        offset: n << 21,
        bytes: Bytes::mib(2),
        notice: n + 7,
        at: n << 22,
    };
    let common = ToLayer::ArenaCommon {
        segment: SegmentInfo {
            id: 5,
            bytes: Bytes::mib(64),
        },
        blocks: (1..4).map(block).collect(),
    };
    let packet = common.encode().unwrap();
    assert_eq!(ToLayer::decode(&packet).as_ref(), Ok(&common));
    for cut in 0..packet.len() {
        assert!(ToLayer::decode(&packet[..cut]).is_err());
    }
}

#[test]
fn the_layout_is_fixed() {
    let packet = ToLayer::Grant {
        device: 1,
        ask: 2,
        bytes: Bytes(3),
    }
    .encode()
    .unwrap();
    let mut expected = vec![b'e', b'b', b'b', b'1', 4, 0, 1, 0, 20, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(packet, expected);
}

#[test]
fn a_newer_peer_is_understood() {
    let mut packet = ToLayer::ArenaRecall { bytes: Bytes(9) }.encode().unwrap();
    packet.extend([1, 2, 3, 4]); // a field that was added later
    packet[8] += 4;
    packet[6] = 2; // by a later version
    assert_eq!(
        ToLayer::decode(&packet),
        Ok(ToLayer::ArenaRecall { bytes: Bytes(9) })
    );
    packet[4] = 200; // a kind that was added later
    assert!(ToLayer::decode(&packet).unwrap_err().is_skippable());
}

#[test]
fn foreign_packets_are_refused() {
    assert_eq!(ToDaemon::decode(b"GET / HTTP/1.1\r\n\r\n"), Err(WireError::Magic));
    let mut packet = ToLayer::Query { query: 1 }.encode().unwrap();
    packet[6] = 0;
    assert_eq!(ToLayer::decode(&packet), Err(WireError::Version(0)));
    let too_long = ToDaemon::Report {
        query: 1,
        text: vec![b' '; MAX_PACKET],
    };
    assert_eq!(too_long.encode(), Err(WireError::TooLong));
}
