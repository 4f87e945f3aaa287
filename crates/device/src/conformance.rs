//! What every [`DeviceMemory`] must do, as a function that a test calls: here over the fake, in `cuda` over the simulated
//! and the real GPU. It panics with the rule that was broken.

use std::sync::Arc;

use crate::{DeviceError, DeviceMemory, Direction, HostAddr, fingerprint};

/// What the suite needs besides the device.
pub trait Host {
    /// Host memory of at least `len` bytes that stays where it is until the suite ends.
    fn memory(&self, len: u64) -> HostAddr;
    /// Fills host memory with a pattern.
    fn fill(&self, at: HostAddr, len: u64, seed: u8);
    /// Whether host memory holds the pattern.
    fn holds(&self, at: HostAddr, len: u64, seed: u8) -> bool;
}

/// The byte at a place of the suite's pattern.
#[must_use]
pub fn pattern(seed: u8, at: u64) -> u8 {
    let mixed = (at ^ u64::from(seed) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed.to_be_bytes()[0]
}

/// Runs every rule. `capacity` is how much the device can give at least; the suite takes a few granules at a time, and
/// once all of it if `fill_up` is set.
///
/// # Panics
/// With the rule that was broken.
pub fn run(device: &Arc<dyn DeviceMemory>, host: &dyn Host, capacity: u64, fill_up: bool) {
    let device = &**device;
    reservations(device);
    memory_keeps_its_bytes_and_its_address(device, host);
    a_run_of_chunks(device, host);
    a_handle_lives_until_it_is_unmapped(device, host);
    both_directions(device, host);
    misuse_is_an_error_and_changes_nothing(device, host);
    registration(device, host);
    zeros(device, host);
    fingerprints(device, host);
    if fill_up {
        out_of_memory_is_an_answer(device, capacity);
    }
    device.quiesce().expect("an idle device is quiet");
}

fn granule(device: &dyn DeviceMemory) -> u64 {
    let granularity = device.granularity();
    assert!(granularity.is_power_of_two(), "granularity {granularity:#x}");
    granularity
}

fn reservations(device: &dyn DeviceMemory) {
    let g = granule(device);
    let a = device.reserve(4 * g, g).expect("reserve");
    let b = device.reserve(4 * g, 8 * g).expect("reserve");
    assert_eq!(a % g, 0, "aligned to the granularity");
    assert_eq!(b % (8 * g), 0, "aligned as asked");
    assert!(a + 4 * g <= b || b + 4 * g <= a, "reservations are apart");
    device.free_reservation(a, 4 * g).expect("free_reservation");
    device.free_reservation(b, 4 * g).expect("free_reservation");
}

/// Physical memory mapped with access.
fn back(device: &dyn DeviceMemory, at: u64, size: u64) -> crate::Handle {
    let handle = device.create(size).expect("create");
    device.map(at, size, handle).expect("map");
    device.set_access(at, size).expect("set_access");
    handle
}

fn copy_in(device: &dyn DeviceMemory, dev: u64, host: HostAddr, len: u64) {
    device.copy_in(dev, host, len).expect("copy_in");
    let marker = device.mark(Direction::In).expect("mark");
    device.wait(marker).expect("wait");
}

fn copy_out(device: &dyn DeviceMemory, host: HostAddr, dev: u64, len: u64) {
    device.copy_out(host, dev, len).expect("copy_out");
    let marker = device.mark(Direction::Out).expect("mark");
    device.wait(marker).expect("wait");
}

/// The whole life of evicted memory: out, unmapped, released; made anew at the same address, in, the same bytes.
fn memory_keeps_its_bytes_and_its_address(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(g, g).expect("reserve");
    let memory = host.memory(g);
    let first = back(device, at, g);
    host.fill(memory, g, 1);
    copy_in(device, at, memory, g);
    host.fill(memory, g, 2);
    copy_out(device, memory, at, g);
    assert!(host.holds(memory, g, 1), "what went in comes out");
    device.unmap(at, g).expect("unmap");
    device.release(first).expect("release");
    let second = back(device, at, g);
    copy_in(device, at, memory, g);
    host.fill(memory, g, 3);
    copy_out(device, memory, at, g);
    assert!(host.holds(memory, g, 1), "and again at the same address");
    device.unmap(at, g).expect("unmap");
    device.release(second).expect("release");
    device.free_reservation(at, g).expect("free_reservation");
}

/// Several mappings in a row are one range for access and copies, and are unmapped one by one or together.
fn a_run_of_chunks(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(3 * g, g).expect("reserve");
    let handles = [0, 1, 2].map(|i| {
        let handle = device.create(g).expect("create");
        device.map(at + i * g, g, handle).expect("map");
        handle
    });
    device
        .set_access(at, 3 * g)
        .expect("one set_access over three mappings");
    let memory = host.memory(3 * g);
    host.fill(memory, 3 * g, 4);
    copy_in(device, at, memory, 3 * g);
    host.fill(memory, 3 * g, 5);
    copy_out(device, memory, at, 3 * g);
    assert!(host.holds(memory, 3 * g, 4), "a copy over mapping borders");
    device.unmap(at + g, g).expect("unmap the middle one");
    let middle = host.memory(g);
    copy_out(device, middle, at + 2 * g, g);
    device.unmap(at, g).expect("unmap");
    device.unmap(at + 2 * g, g).expect("unmap");
    for handle in handles {
        device.release(handle).expect("release");
    }
    device.free_reservation(at, 3 * g).expect("free_reservation");
}

/// Released first, unmapped later: the bytes are there until then.
fn a_handle_lives_until_it_is_unmapped(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(g, g).expect("reserve");
    let memory = host.memory(g);
    let handle = back(device, at, g);
    host.fill(memory, g, 6);
    copy_in(device, at, memory, g);
    device.release(handle).expect("release while mapped");
    host.fill(memory, g, 7);
    copy_out(device, memory, at, g);
    assert!(host.holds(memory, g, 6), "mapped memory outlives its handle");
    device.unmap(at, g).expect("unmap");
    device.free_reservation(at, g).expect("free_reservation");
}

/// Several copies in flight in both directions, markers waited for in any order.
fn both_directions(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(2 * g, g).expect("reserve");
    let handles = [back(device, at, g), back(device, at + g, g)];
    let source = host.memory(g);
    let target = host.memory(g);
    host.fill(source, g, 8);
    copy_in(device, at, source, g);
    let mut markers = Vec::new();
    for quarter in 0..4 {
        let piece = g / 4;
        let offset = quarter * piece;
        device
            .copy_out(target.offset(offset), at + offset, piece)
            .expect("copy_out");
        let out = device.mark(Direction::Out).expect("mark");
        device
            .copy_in(at + g + offset, source.offset(offset), piece)
            .expect("copy_in");
        let into = device.mark(Direction::In).expect("mark");
        markers.extend([into, out]);
    }
    let last = markers.pop().expect("eight markers");
    let mut turns = 0u64;
    while !device.done(&last).expect("done") {
        turns += 1;
        assert!(turns < 1 << 40, "a copy comes to an end");
    }
    device.wait(last).expect("wait");
    for marker in markers {
        device.wait(marker).expect("wait for an earlier one");
    }
    assert!(host.holds(target, g, 8));
    host.fill(target, g, 9);
    copy_out(device, target, at + g, g);
    assert!(host.holds(target, g, 8));
    device.unmap(at, g).expect("unmap");
    device.unmap(at + g, g).expect("unmap");
    for handle in handles {
        device.release(handle).expect("release");
    }
    device.free_reservation(at, 2 * g).expect("free_reservation");
}

fn misuse_is_an_error_and_changes_nothing(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(2 * g, g).expect("reserve");
    let handle = back(device, at, g);
    let other = device.create(g).expect("create");
    assert!(device.map(at, g, other).is_err(), "mapped over a mapping");
    assert!(device.unmap(at + g, g).is_err(), "unmapped what is not mapped");
    assert!(device.create(g + 1).is_err(), "a size between granules");
    let memory = host.memory(g);
    host.fill(memory, g, 10);
    copy_in(device, at, memory, g);
    copy_out(device, memory, at, g);
    assert!(host.holds(memory, g, 10), "the first mapping still works");
    device.map(at + g, g, other).expect("the handle is still good");
    device.unmap(at + g, g).expect("unmap");
    device.unmap(at, g).expect("unmap");
    device.release(other).expect("release");
    device.release(handle).expect("release");
    device.free_reservation(at, 2 * g).expect("free_reservation");
}

fn registration(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(g, g).expect("reserve");
    let handle = back(device, at, g);
    let memory = host.memory(g);
    for seed in [11, 12] {
        device.register_host(memory, g).expect("register_host");
        host.fill(memory, g, seed);
        copy_in(device, at, memory, g);
        host.fill(memory, g, 0);
        copy_out(device, memory, at, g);
        assert!(host.holds(memory, g, seed));
        device.unregister_host(memory, g).expect("unregister_host");
    }
    // Not every driver registers what is only read.
    if device.register_read_only(memory, g).is_ok() {
        host.fill(memory, g, 13);
        copy_in(device, at, memory, g);
        device.unregister_host(memory, g).expect("unregister_host");
        host.fill(memory, g, 0);
        copy_out(device, memory, at, g);
        assert!(host.holds(memory, g, 13));
    }
    device.unmap(at, g).expect("unmap");
    device.release(handle).expect("release");
    device.free_reservation(at, g).expect("free_reservation");
}

/// Zeros come in the order of copies in.
fn zeros(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let at = device.reserve(2 * g, g).expect("reserve");
    let handle = back(device, at, 2 * g);
    let memory = host.memory(2 * g);
    host.fill(memory, 2 * g, 13);
    device.copy_in(at, memory, 2 * g).expect("copy_in");
    device.zero(at + g, g).expect("zero");
    copy_in(device, at, memory, g / 2);
    let zero = device.fingerprint(&[(at + g, g)]).expect("fingerprint");
    assert!(zero.iter().all(|print| print.zero), "zeros are zero");
    host.fill(memory, 2 * g, 14);
    copy_out(device, memory, at, 2 * g);
    assert!(host.holds(memory, g, 13), "and nothing else is");
    device.unmap(at, 2 * g).expect("unmap");
    device.release(handle).expect("release");
    device.free_reservation(at, 2 * g).expect("free_reservation");
}

/// Equal bytes have equal fingerprints, at any address, and no others.
fn fingerprints(device: &dyn DeviceMemory, host: &dyn Host) {
    let g = granule(device);
    let len = fingerprint::BLOCK.next_multiple_of(g) + g;
    let at = device.reserve(2 * len, g).expect("reserve");
    let handles = [back(device, at, len), back(device, at + len, len)];
    let memory = host.memory(len);
    host.fill(memory, len, 15);
    device.copy_in(at, memory, len).expect("copy_in");
    copy_in(device, at + len, memory, len);
    let both = [(at, len), (at + len, len)];
    let prints = device.fingerprint(&both).expect("fingerprint");
    let count = prints.len() / 2;
    assert_eq!(count as u64, fingerprint::count(len), "one of each block");
    let (first, second) = prints.split_at(count);
    assert_eq!(first, second, "the same bytes at two addresses");
    assert!(prints.iter().all(|print| !print.zero), "none is zero");
    assert_ne!(first[0], first[1], "different bytes");
    assert_eq!(
        device.fingerprint(&both).expect("fingerprint"),
        prints,
        "and again"
    );
    // One vector of 16 bytes in the last block.
    host.fill(memory, 16, 16);
    copy_in(device, at + len - 32, memory, 16);
    let after = device.fingerprint(&both).expect("fingerprint");
    assert_ne!(after[count - 1], first[count - 1], "a change is seen");
    assert_eq!(after[..count - 1], first[..count - 1], "and only where it is");
    assert_eq!(after[count..], *second);
    assert_eq!(
        device.fingerprint(&both[1..]).expect("fingerprint"),
        second,
        "whatever is asked for besides"
    );
    assert_eq!(device.fingerprint(&[]), Ok(Vec::new()));
    device.unmap(at, 2 * len).expect("unmap");
    for handle in handles {
        device.release(handle).expect("release");
    }
    device.free_reservation(at, 2 * len).expect("free_reservation");
}

/// Takes all there is, is refused properly, and gets all of it again after giving it back.
fn out_of_memory_is_an_answer(device: &dyn DeviceMemory, capacity: u64) {
    let g = granule(device);
    let piece = (capacity / 8).next_multiple_of(g).max(g);
    let fill = || {
        let mut taken = Vec::new();
        let error = loop {
            assert!(taken.len() < 1 << 20, "a card is finite");
            match device.create(piece) {
                Ok(handle) => taken.push(handle),
                Err(error) => break error,
            }
        };
        assert_eq!(error, DeviceError::OutOfMemory, "the answer of a full card");
        taken
    };
    let first = fill();
    assert!(
        first.len() as u64 >= capacity / piece,
        "all of the capacity was given"
    );
    let count = first.len();
    for handle in first {
        device.release(handle).expect("release");
    }
    let second = fill();
    assert_eq!(second.len(), count, "nothing was lost");
    for handle in second {
        device.release(handle).expect("release");
    }
}
