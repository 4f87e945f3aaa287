//! What is to leave, in which order, and what of it need not be copied.
//!
//! The device is closed and quiet: what is told here of a chunk stays true until the chunk has left. That it is still the
//! same memory is known by its handle.

use std::collections::{BTreeMap, BTreeSet};

use ebb_device::{DeviceError, Fingerprint, Handle, fingerprint};

use super::chunks::{self, Chunk};
use crate::core::Core;
use crate::device::Device;
use crate::kept::Ticket;
use crate::pool::choose;

/// What the GPU said of chunks.
#[derive(Debug, Default)]
pub(super) struct Survey {
    known: BTreeMap<Chunk, (Handle, Vec<Fingerprint>)>,
}

/// In which order chunks should leave.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// These first.
    pub(super) free: Vec<Chunk>,
    /// These need host memory, or may.
    pub(super) copied: Vec<Chunk>,
}

/// A chunk that can be read where it lies.
struct Readable {
    chunk: Chunk,
    len: u64,
    at: u64,
    handle: Handle,
    kept: Option<Ticket>,
}

impl Survey {
    /// Looks at what an eviction of `bytes` may take. Also the order in which it should: first what costs no host memory and
    /// no copy (what nobody has written, what is unchanged, what is zero), then the rest.
    pub(super) fn take(core: &Core, device: &Device, bytes: u64) -> (Self, Order) {
        let mut survey = Self::default();
        let (all, readable) = {
            let state = device.lock();
            let all = chunks::candidates(core, device, &state, bytes);
            let readable: Vec<Readable> = all
                .iter()
                .filter(|(_, copied)| *copied > 0)
                .filter_map(|(chunk, len)| {
                    let (at, handle, kept) = chunk.readable(core, device, &state)?;
                    Some(Readable {
                        chunk: *chunk,
                        len: *len,
                        at,
                        handle,
                        kept,
                    })
                })
                .collect();
            (all, readable)
        };
        let kept: BTreeMap<Chunk, Vec<Fingerprint>> = readable
            .iter()
            .filter_map(|one| Some((one.chunk, core.arena.prints_of(one.kept?)?)))
            .collect();
        let (first, others): (Vec<&Readable>, Vec<&Readable>) =
            readable.iter().partition(|one| kept.contains_key(&one.chunk));
        let (blank, written): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, copied)| *copied == 0);
        let told = survey.look(core, device, &first);
        let (free, copied): (Vec<_>, Vec<_>) = written.into_iter().partition(|(chunk, _)| {
            survey.known.get(chunk).is_some_and(|(_, now)| {
                let zero = now.iter().all(|print| print.zero);
                zero || kept.get(chunk) == Some(now)
            })
        });
        // Nobody knows here what the blank ones hold; at worst some more are looked at than are needed.
        let sum = |some: &[(Chunk, u64)]| some.iter().map(|(_, len)| len).sum::<u64>();
        let rest = bytes.saturating_sub(sum(&free));
        let copied = choose(copied, rest);
        let mut needed = 0;
        let wanted: BTreeSet<Chunk> = copied
            .iter()
            .take_while(|(_, len)| {
                let more = needed < rest;
                needed += len;
                more
            })
            .map(|(chunk, _)| *chunk)
            .collect();
        let second: Vec<&Readable> = others
            .into_iter()
            .filter(|one| wanted.contains(&one.chunk))
            .collect();
        let _ = told && survey.look(core, device, &second);
        let (zero, copied): (Vec<_>, Vec<_>) = copied.into_iter().partition(|(chunk, _)| {
            let known = survey.known.get(chunk);
            known.is_some_and(|(_, now)| now.iter().all(|print| print.zero))
        });
        let free = blank.into_iter().chain(choose(free, bytes)).chain(zero);
        let order = Order {
            free: free.map(|(chunk, _)| chunk).collect(),
            copied: copied.into_iter().map(|(chunk, _)| chunk).collect(),
        };
        (survey, order)
    }

    /// Asks the GPU. `false` if it does not tell.
    fn look(&mut self, core: &Core, device: &Device, chunks: &[&Readable]) -> bool {
        if chunks.is_empty() {
            return true;
        }
        let ranges: Vec<(u64, u64)> = chunks.iter().map(|one| (one.at, one.len)).collect();
        let prints = match device.memory.fingerprint(&ranges) {
            Ok(prints) => {
                device.lock().unprinted = false;
                prints
            }
            Err(error) => {
                let mut state = device.lock();
                state.dead |= error == DeviceError::Gone;
                // Said when it begins: without it everything works, slower.
                if !std::mem::replace(&mut state.unprinted, true) {
                    drop(state);
                    core.events.note(format!(
                        "device {}: what is unchanged cannot be told, all is copied: {error}",
                        device.index
                    ));
                }
                return false;
            }
        };
        let mut prints = prints.into_iter();
        for one in chunks {
            let count = usize::try_from(fingerprint::count(one.len)).unwrap_or(usize::MAX);
            let some: Vec<Fingerprint> = prints.by_ref().take(count).collect();
            if some.len() == count {
                self.known.insert(one.chunk, (one.handle, some));
            }
        }
        true
    }

    /// What is known of a chunk, if that is its memory.
    pub(super) fn of(&self, chunk: Chunk, handle: Handle) -> Vec<Fingerprint> {
        match self.known.get(&chunk) {
            Some((seen, prints)) if *seen == handle => prints.clone(),
            _ => Vec::new(),
        }
    }
}
