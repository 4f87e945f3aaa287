//! What the driver places by itself on a device, beside the pool: managed memory, and what it keeps for graphs.
//!
//! Neither has chunks that could be taken away, but the driver can be asked to send them off: managed memory by a prefetch to
//! the host, memory that is kept for graphs and in no use by a trim. Both happen on a release, by the owner thread,
//! after the gate is closed and the work is quiet, and change no address and no byte. Nothing is done when the program goes on: the driver
//! brings a page of managed memory when it is touched, and takes memory for a graph when that is launched.
//!
//! Managed memory needs no lease, so that none comes back for it: the daemon is told how much could go (that is *loose*), holds it against
//! what NVML sees of this process beyond its account, and orders it away as it does lease, from a program that has no lease at all, too, and
//! for an allocation of this very program. What went is told piece by piece. Memory nodes keep theirs: a launch must not fail because it was lent out.
//!
//! # How much of it is on the card
//! The driver does not say. What a push frees is seen by what is in use on the card before and after it. It is no more than what is in use on the card beyond what the pool and the driver's own take; when
//! that comes down to nothing, pushing ends. That bound also keeps a push from filling host memory with pages that were never on the card.

mod room;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_device::{DeviceError, Direction};
use ebb_units::Bytes;

use crate::core::Core;
use crate::device::{Device, Order};
use crate::engine::ExternalKind;

/// So much is pushed at once: a push cannot be taken back, and the owner looks around between two.
const PIECE: u64 = 64 << 20;
/// And no less, where less is wanted: nobody knows which pages are on the card.
const LEAST: u64 = 8 << 20;
/// One release pushes for so long at most. The rest goes by the next one.
const AT_MOST: Duration = Duration::from_secs(5);

/// One allocation of managed memory.
#[derive(Clone, Copy, Debug)]
struct Range {
    len: u64,
    /// So much of its beginning was pushed, when the program had made so many passages of the gate.
    out: (u64, u64),
}

impl Range {
    /// Without a passage since, nothing of it can have come back.
    fn out(&self, passages: u64) -> u64 {
        if self.out.1 == passages { self.out.0 } else { 0 }
    }
}

/// What is known of it.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    ranges: BTreeMap<u64, Range>,
    /// Bytes that were asked to move, for the report.
    pushed: u64,
    /// The driver or the device cannot move managed memory.
    unable: bool,
    /// What the driver kept for graphs after the last trim.
    graphs_kept: u64,
    /// What graphs had that are gone since: the driver may keep it.
    graphs_left: u64,
    /// Bytes that left the card and the daemon was not told of.
    gone: u64,
    /// What the daemon was told last that could go.
    told: u64,
}

impl Beside {
    /// Managed memory was made.
    pub(crate) fn made(&mut self, base: u64, len: u64) {
        self.ranges.insert(base, Range { len, out: (0, 0) });
    }

    /// It is gone.
    pub(crate) fn gone(&mut self, base: u64) {
        self.ranges.remove(&base);
    }

    /// Bytes of managed memory that are known to be in host memory.
    pub(crate) fn out(&self, passages: u64) -> u64 {
        self.ranges.values().map(|range| range.out(passages)).sum()
    }

    /// Bytes that an order could send away, at the most.
    pub(crate) fn loose(&self, passages: u64) -> u64 {
        let all: u64 = self.ranges.values().map(|range| range.len).sum();
        let managed = if self.unable { 0 } else { all - self.out(passages) };
        managed.saturating_add(self.graphs_left)
    }

    /// Memory of graphs is gone, as far as the program goes.
    pub(crate) fn graph_gone(&mut self, bytes: u64) {
        self.graphs_left = self.graphs_left.saturating_add(bytes);
    }

    /// The daemon is about to be told that so much could go: that, and what went, if it does not know.
    pub(crate) fn news(&mut self, loose: u64) -> Option<(u64, u64)> {
        let gone = std::mem::take(&mut self.gone);
        let before = std::mem::replace(&mut self.told, loose);
        (before != loose || gone > 0).then_some((loose, gone))
    }

    /// The next daemon knows nothing.
    pub(crate) fn untold(&mut self) {
        (self.gone, self.told) = (0, 0);
    }

    /// Bytes that were ever asked to move.
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// What the driver kept for graphs after the last trim.
    pub(crate) fn graphs_kept(&self) -> u64 {
        self.graphs_kept
    }
}

/// Whether a release has something to do here.
pub(crate) fn has_any(core: &Core, device: &Device) -> bool {
    let state = device.lock();
    has_graphs(&state) || !to_push(core, &state).is_empty()
}

/// Also once they are gone: the driver keeps their memory until it is trimmed.
fn has_graphs(state: &crate::device::State) -> bool {
    state.external.contains_key(&ExternalKind::Graph)
}

/// Where there is something to push: address, length, and how much of it is out already.
fn to_push(core: &Core, state: &crate::device::State) -> Vec<(u64, u64, u64)> {
    if state.beside.unable || state.dead {
        return Vec::new();
    }
    let passages = core.gate.passages();
    let ranges = state.beside.ranges.iter();
    ranges
        .map(|(base, range)| (*base, range.len, range.out(passages)))
        .filter(|(_, len, out)| out < len)
        .collect()
}

/// Sends away what can be sent away, `left` bytes of the card at least. The gate is closed for the device, and its work is quiet.
pub(crate) fn send_away(core: &Core, device: &Device, order: &Order, left: &mut u64) {
    let (graphs, ranges) = {
        let state = device.lock();
        if state.dead {
            return;
        }
        (has_graphs(&state), to_push(core, &state))
    };
    if graphs && may_go_on(core, device, order) {
        counted(core, device, left, || trim(core, device));
    }
    if !ranges.is_empty() && *left > 0 {
        push(core, device, order, &ranges, left);
    }
}

fn may_go_on(core: &Core, device: &Device, order: &Order) -> bool {
    let state = device.lock();
    !state.dead && !state.is_void(order) && !core.is_exiting() && core.captures() == 0
}

/// Does something that frees memory of the card, and tells of what it freed. Others who allocate or free at the same time blur that; the
/// daemon sees the truth in a moment.
fn counted<T>(core: &Core, device: &Device, left: &mut u64, run: impl FnOnce() -> T) -> T {
    let before = device.memory.occupied().unwrap_or(0);
    let done = run();
    let freed = before.saturating_sub(device.memory.occupied().unwrap_or(before));
    *left = left.saturating_sub(freed);
    let mut state = device.lock();
    state.beside.gone += freed;
    if freed > 0
        && let Some(news) = state.beside_news(core)
    {
        core.link.send(news);
    }
    done
}

fn trim(core: &Core, device: &Device) {
    match device.memory.trim_graphs() {
        Ok(kept) => {
            let beside = &mut device.lock().beside;
            (beside.graphs_kept, beside.graphs_left) = (kept, 0);
        }
        Err(error) => note(core, device, "trimming what is kept for graphs", error),
    }
}

/// Pushes managed memory to the host until so much is freed, as long as some of it may be on the card and the host has room.
fn push(core: &Core, device: &Device, order: &Order, ranges: &[(u64, u64, u64)], left: &mut u64) {
    let deadline = Instant::now() + AT_MOST;
    let mut pushed = 0;
    'all: for (base, len, out) in ranges.iter().copied() {
        let mut done = out;
        while done < len {
            if !may_be_there(device) {
                // Wherever it is, it is not here.
                done = len;
                break;
            }
            if *left == 0 {
                break;
            }
            let piece = PIECE.min(len - done).min((*left).max(LEAST));
            if !may_go_on(core, device, order) || Instant::now() >= deadline {
                break 'all;
            }
            if !room::is_there_for(piece) {
                core.events.note(format!(
                    "device {}: no room in host memory for managed memory",
                    device.index
                ));
                break 'all;
            }
            match counted(core, device, left, || move_out(device, base + done, piece)) {
                Ok(()) => pushed += piece,
                Err(error) => {
                    note(core, device, "pushing managed memory to the host", error);
                    if is_unable(error) {
                        device.lock().beside.unable = true;
                        break 'all;
                    }
                    // It was freed a moment ago, or is of a kind that the driver does not move.
                    continue 'all;
                }
            }
            done += piece;
            is_out(core, device, (base, len), done);
        }
        is_out(core, device, (base, len), done);
        if *left == 0 {
            break;
        }
    }
    device.lock().beside.pushed += pushed;
    if pushed > 0 {
        core.events.note(format!(
            "device {}: {} of managed memory pushed to the host",
            device.index,
            Bytes(pushed)
        ));
    }
    core.link.poke();
}

/// So much of the beginning of a range is in host memory.
fn is_out(core: &Core, device: &Device, (base, len): (u64, u64), done: u64) {
    let passages = core.gate.passages();
    if let Some(range) = device.lock().beside.ranges.get_mut(&base)
        && range.len == len
    {
        range.out = (done, passages);
    }
}

fn move_out(device: &Device, addr: u64, len: u64) -> Result<(), DeviceError> {
    device.memory.push_to_host(addr, len)?;
    device.memory.wait(device.memory.mark(Direction::Out)?)
}

/// Whether anything of managed memory can be on the card, by all that is known.
fn may_be_there(device: &Device) -> bool {
    let Ok(occupied) = device.memory.occupied() else {
        return true;
    };
    let books = device.lock().pool.books;
    // Memory nodes are in `used` from the moment they are made, on the card only once they were launched.
    let surely = books.used.saturating_sub(books.external);
    occupied
        > surely
            .saturating_add(books.overhead)
            .saturating_add(device.memory.taken_besides())
}

/// The driver's code for what it cannot do at all.
const fn is_unable(error: DeviceError) -> bool {
    matches!(error, DeviceError::Driver { code: 801, .. } | DeviceError::Gone)
}

fn note(core: &Core, device: &Device, doing: &str, error: DeviceError) {
    core.events
        .note(format!("device {}: {doing}: {error}", device.index));
    device.lock().counters.driver_errors += 1;
}
