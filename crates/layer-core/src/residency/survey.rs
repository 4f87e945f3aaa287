//! What is to leave, in which order, and what of it need not be copied.
//!
//! The device is closed and quiet: what is told here of a chunk stays true until the chunk has left. That it is still the
//! same memory is known by its handle.
//!
//! Letting memory go takes the driver twice as long as reading it takes the GPU, and the processor has nothing to do with the second. So a large
//! eviction does both at once: a thread asks about one slice after the other, and the owner drops, or copies, what was told of.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::JoinHandle;

use ebb_device::{DeviceError, Fingerprint, Handle, fingerprint};

use super::chunks::{self, Chunk};
use crate::core::Core;
use crate::device::Device;
use crate::kept::Ticket;
use crate::pool::choose;
use crate::threads;

/// What the GPU said of chunks.
#[derive(Debug, Default)]
pub(super) struct Survey {
    known: BTreeMap<Chunk, (Handle, Vec<Fingerprint>)>,
}

/// What should leave, in the order in which it should, as far as is told; see [`Feed::look`].
#[derive(Debug, Default)]
pub(super) struct Feed {
    /// These first: they cost no host memory and no copy.
    free: VecDeque<Chunk>,
    /// These need host memory, or may.
    copied: VecDeque<Chunk>,
    telling: Option<Telling>,
}

/// The GPU is asked, a slice at a time, while what it has told of leaves.
///
/// Dropped: waits until nothing is asked any more. The program may run only after that.
#[derive(Debug)]
struct Telling {
    /// What was asked about and is not answered, in the order of the answers.
    slices: VecDeque<Vec<Readable>>,
    kept: BTreeMap<Chunk, Vec<Fingerprint>>,
    answers: Option<Receiver<Said>>,
    thread: Option<JoinHandle<()>>,
}

/// A chunk that can be read where it lies.
#[derive(Debug)]
struct Readable {
    chunk: Chunk,
    len: u64,
    at: u64,
    handle: Handle,
    kept: Option<Ticket>,
}

/// What the GPU answers, or why it does not.
type Said = Result<Vec<Fingerprint>, DeviceError>;

fn ranges(chunks: &[Readable]) -> Vec<(u64, u64)> {
    chunks.iter().map(|one| (one.at, one.len)).collect()
}

impl Survey {
    /// Looks at what an eviction of `bytes` may take. Also the order in which it should: first what costs no host memory and
    /// no copy (what nobody has written, what is unchanged, what is zero), then the rest. If everything has to go, and it is much, nobody waits
    /// for the answers here: the feed has them.
    pub(super) fn take(core: &Core, device: &Device, bytes: u64) -> (Self, Feed) {
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
        let sum = |some: &[(Chunk, u64)]| some.iter().map(|(_, len)| len).sum::<u64>();
        let slice = core.config.survey_slice.get();
        if sum(&all) <= bytes && readable.iter().map(|one| one.len).sum::<u64>() > slice {
            return (survey, Feed::telling(device, &all, readable, kept, slice));
        }
        let (first, others): (Vec<Readable>, Vec<Readable>) = readable
            .into_iter()
            .partition(|one| kept.contains_key(&one.chunk));
        let (blank, written): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, copied)| *copied == 0);
        let told = survey.look(core, device, &first);
        for one in first.iter().filter(|_| told) {
            survey.judge(core, one, &kept);
        }
        let (free, copied): (Vec<_>, Vec<_>) = written
            .into_iter()
            .partition(|(chunk, _)| survey.needs_no_copy(*chunk, &kept));
        // Nobody knows here what the blank ones hold; at worst some more are looked at than are needed.
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
        let second: Vec<Readable> = others
            .into_iter()
            .filter(|one| wanted.contains(&one.chunk))
            .collect();
        let _ = told && survey.look(core, device, &second);
        let (zero, copied): (Vec<_>, Vec<_>) = copied
            .into_iter()
            .partition(|(chunk, _)| survey.needs_no_copy(*chunk, &kept));
        let free = blank.into_iter().chain(choose(free, bytes)).chain(zero);
        let feed = Feed {
            free: free.map(|(chunk, _)| chunk).collect(),
            copied: copied.into_iter().map(|(chunk, _)| chunk).collect(),
            telling: None,
        };
        (survey, feed)
    }

    /// Whether a chunk is zero, or equals its kept copy.
    fn needs_no_copy(&self, chunk: Chunk, kept: &BTreeMap<Chunk, Vec<Fingerprint>>) -> bool {
        self.known.get(&chunk).is_some_and(|(_, now)| {
            let zero = now.iter().all(|print| print.zero);
            zero || kept.get(&chunk) == Some(now)
        })
    }

    /// Whether a chunk needs no copy; if it is not as its kept copy is, that is noted.
    fn judge(&self, core: &Core, one: &Readable, kept: &BTreeMap<Chunk, Vec<Fingerprint>>) -> bool {
        let free = self.needs_no_copy(one.chunk, kept);
        if let Some(ticket) = one.kept.filter(|_| !free && self.known.contains_key(&one.chunk)) {
            core.arena.differs(ticket);
        }
        free
    }

    /// Asks the GPU. `false` if it does not tell.
    fn look(&mut self, core: &Core, device: &Device, chunks: &[Readable]) -> bool {
        chunks.is_empty() || self.hear(core, device, chunks, device.memory.fingerprint(&ranges(chunks)))
    }

    /// What it said.
    fn hear(&mut self, core: &Core, device: &Device, chunks: &[Readable], said: Said) -> bool {
        let prints = match said {
            Ok(prints) => {
                let own = device.memory.taken_besides();
                let mut state = device.lock();
                state.unprinted = false;
                if std::mem::replace(&mut state.pool.books.own, own) != own {
                    // The card has as much less for others, from now on.
                    let usage = state.usage(core, core.touches(device.index));
                    usage.into_iter().for_each(|usage| core.link.send(usage));
                }
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

impl Feed {
    /// The next that leaves. Without `room`, only what needs none.
    pub(super) fn next(&mut self, room: bool) -> Option<Chunk> {
        // What is copied may crowd kept copies out, and those that are good still are not known before they are told of.
        let told = |telling: &Telling| {
            telling
                .slices
                .iter()
                .flatten()
                .all(|one| !telling.kept.contains_key(&one.chunk))
        };
        match self.free.pop_front() {
            None if room && self.telling.as_ref().is_none_or(told) => self.copied.pop_front(),
            next => next,
        }
    }

    /// It could not begin yet.
    pub(super) fn put_back(&mut self, chunk: Chunk) {
        self.copied.push_front(chunk);
    }

    /// Whether there is something to begin with.
    pub(super) fn is_empty(&self, room: bool) -> bool {
        self.free.is_empty() && (self.copied.is_empty() || !room)
    }

    /// Has the GPU asked about `readable`, a slice at a time: what has a kept copy first.
    fn telling(
        device: &Device,
        all: &[(Chunk, u64)],
        readable: Vec<Readable>,
        kept: BTreeMap<Chunk, Vec<Fingerprint>>,
        slice: u64,
    ) -> Self {
        let asked: BTreeSet<Chunk> = readable.iter().map(|one| one.chunk).collect();
        let named = |blank: bool| {
            let some = all.iter().filter(move |(_, copied)| (*copied == 0) == blank);
            some.map(|(chunk, _)| *chunk)
        };
        let (first, others): (Vec<Readable>, Vec<Readable>) = readable
            .into_iter()
            .partition(|one| kept.contains_key(&one.chunk));
        let mut slices: VecDeque<Vec<Readable>> = VecDeque::new();
        let mut full = slice;
        for one in first.into_iter().chain(others) {
            if full >= slice {
                slices.push_back(Vec::new());
                full = 0;
            }
            full += one.len;
            if let Some(last) = slices.back_mut() {
                last.push(one);
            }
        }
        let questions: Vec<Vec<(u64, u64)>> = slices.iter().map(|slice| ranges(slice)).collect();
        let (say, answers) = mpsc::channel();
        let memory = Arc::clone(&device.memory);
        let ask = move || {
            for question in questions {
                let said = memory.fingerprint(&question);
                // Once it does not tell, it is not asked any more; nor if nobody listens.
                if said.is_err() | say.send(said).is_err() {
                    break;
                }
            }
        };
        // Without a thread nobody is asked, and everything is copied: as if the GPU did not tell.
        let thread = threads::spawn("ebb-look", ask).ok();
        Self {
            free: named(true).collect(),
            copied: named(false).filter(|chunk| !asked.contains(chunk)).collect(),
            telling: Some(Telling {
                slices,
                kept,
                answers: Some(answers),
                thread,
            }),
        }
    }

    /// Takes in what has been told meanwhile; waits for some of it if `wait`. `false`: there is nothing more to come.
    pub(super) fn look(&mut self, survey: &mut Survey, core: &Core, device: &Device, wait: bool) -> bool {
        let mut wait = wait;
        while let Some(telling) = &mut self.telling {
            let answers = telling.answers.as_ref();
            let said = if std::mem::take(&mut wait) {
                answers.and_then(|answers| answers.recv().ok())
            } else {
                match answers.map(Receiver::try_recv) {
                    Some(Err(TryRecvError::Empty)) => return true,
                    said => said.and_then(Result::ok),
                }
            };
            let Some((said, slice)) = said.and_then(|said| Some((said, telling.slices.pop_front()?))) else {
                // It ended: what it did not tell of is copied.
                let rest = telling.slices.drain(..).flatten();
                self.copied.extend(rest.map(|one| one.chunk));
                self.telling = None;
                break;
            };
            survey.hear(core, device, &slice, said);
            for one in slice {
                if survey.judge(core, &one, &telling.kept) {
                    self.free.push_back(one.chunk);
                } else {
                    self.copied.push_back(one.chunk);
                }
            }
        }
        self.telling.is_some()
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        // Its next word finds nobody.
        self.answers = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
