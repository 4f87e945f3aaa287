//! What the engine costs by itself, over a fake device: a passage of the gate, and an allocation and a free that the
//! pool serves. Run with `cargo run --release -p ebb-layer-core --example costs`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use ebb_device::fake::{Card, FakeDevice, FakeHost};
use ebb_layer_core::{Config, Engine, Gate};
use ebb_units::{Bytes, DeviceUuid};

static GATE: Gate = Gate::new();

/// The best of many batches, in nanoseconds a call: what the machine does besides only makes it slower.
fn best(calls: u32, mut run: impl FnMut()) -> f64 {
    (0..100)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| run());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
        })
        .fold(f64::INFINITY, f64::min)
}

fn main() {
    let host = Arc::new(FakeHost::default());
    let device = FakeDevice::new(Card::new(256 << 20), host.clone(), 2 << 20);
    let engine = Engine::start(Config::new(host), &GATE);
    let index = engine
        .attach_device(
            DeviceUuid([1; 16]),
            Arc::new(device),
            Bytes::mib(256),
            Bytes::ZERO,
        )
        .expect("a fake device has addresses");
    let passage = best(100_000, || {
        if black_box(&GATE).enter().is_ok() {
            GATE.leave();
        }
    });
    println!("gate, one passage:            {passage:7.1} ns");
    let pair = |size| {
        best(1000, || {
            let ptr = engine.alloc(index, size, 0).expect("room");
            engine.free(ptr).expect("live");
        })
    };
    println!("64 MiB, allocation and free:  {:7.1} ns", pair(64 << 20));
    println!("512 B, allocation and free:   {:7.1} ns", pair(512));
}
