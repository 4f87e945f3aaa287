//! A thread beside the one that moves chunks: it makes rooms on other cards ahead of need, and takes apart those that nobody needs.
//!
//! A copy to another card takes as long as the driver's calls for the room that it goes to: some five calls for each chunk on the way out, three
//! on the way in. In line with the copies they halve the rate, so none of them is.
//!
//! ```text
//!            take_next          made                    book
//!   lent ─────────────> Making ─────> Ready (for nobody) ────> Booked, and from there as any room
//!                         │ book ──> Promised ── made ────────────^  (who builds it waits)
//!                         │ failed, or  │ wanted back, the card is shunned, the move is over
//!                         └─────────────┴──> Going
//! ```
//! What is made ahead is lent already, counts as held, and is the first that goes when its card wants it. At most [`AHEAD`] rooms wait for a chunk.
//!
//! # Locks
//! As for all rooms. The thread waits under their lock, and makes driver calls without it.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use ebb_device::{DeviceMemory, Props};
use ebb_units::DeviceUuid;

use super::{Books, Built, Room, Rooms, State, build};
use crate::core::Core;
use crate::device::Device;
use crate::threads;

/// Rooms that wait for a chunk at most.
const AHEAD: usize = 6;

/// Of one device, while its helper runs.
#[derive(Debug, Default)]
pub(super) struct Help {
    running: bool,
    /// Chunks that are to leave, by their lengths, for which nothing is made yet.
    todo: VecDeque<u64>,
}

/// The thread. Dropped: it has ended, and nothing that it made waits for a chunk any more.
#[derive(Debug)]
#[must_use = "it ends when this is dropped"]
pub(crate) struct Helper {
    core: Arc<Core>,
    device: usize,
    thread: Option<JoinHandle<()>>,
}

/// What is to be made.
struct Next {
    id: u64,
    len: u64,
    lender: DeviceUuid,
    props: Props,
    memory: Arc<dyn DeviceMemory>,
}

enum Job {
    Make(Next),
    Sweep,
    End,
}

impl Rooms {
    /// Has rooms made for chunks of these lengths, in their order, as far as there is room lent; and rooms that are left taken apart. Without a thread
    /// whoever moves chunks does it all.
    pub(crate) fn help(&self, core: &Arc<Core>, device: &Device, chunks: Vec<u64>) -> Option<Helper> {
        {
            let mut books = self.lock();
            let home = books.homes.get_mut(&device.index)?;
            home.help = Help {
                running: true,
                todo: chunks.into(),
            };
        }
        let (with, index, memory) = (Arc::clone(core), device.index, Arc::clone(&device.memory));
        let work = move || with.arena.rooms.work(&with, index, &memory);
        let thread = threads::spawn("ebb-rooms", work).ok();
        let helper = Helper {
            core: Arc::clone(core),
            device: device.index,
            thread,
        };
        // Dropped, it is not running any more.
        helper.thread.is_some().then_some(helper)
    }

    /// Whether a device has anything elsewhere.
    pub(crate) fn any_of(&self, device: usize) -> bool {
        self.lock().rooms.values().any(|room| room.home == device)
    }

    /// As [`Self::sweep`], by the helper if there is one.
    pub(crate) fn sweep_beside(&self, core: &Core, device: usize) {
        let books = self.lock();
        if books.homes.get(&device).is_some_and(|home| home.help.running) {
            drop(books);
            self.changed.notify_all();
        } else {
            drop(books);
            self.sweep(core);
        }
    }

    fn work(&self, core: &Core, device: usize, memory: &Arc<dyn DeviceMemory>) {
        loop {
            let job = {
                let mut books = self.lock();
                loop {
                    match books.next_job(device, memory) {
                        Some(job) => break job,
                        None => books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            let _at_driver = core.at_driver();
            match job {
                job if core.is_exiting() => {
                    // The owner turns back as well.
                    let mut books = self.lock();
                    if let Job::Make(next) = job
                        && let Some(room) = books.rooms.get_mut(&next.id)
                    {
                        room.state = State::Going;
                    }
                    books.stop_help(device);
                    drop(books);
                    self.changed.notify_all();
                    return;
                }
                Job::End => return,
                Job::Sweep => self.sweep(core),
                Job::Make(next) => self.make(core, device, &next),
            }
        }
    }

    fn make(&self, core: &Core, device: usize, next: &Next) {
        let mut built = Built::default();
        let made = build(&*next.memory, next.len, &next.props, &mut built);
        let mut guard = self.lock();
        let books = &mut *guard;
        let good = books.homes.get(&device).is_some_and(|home| {
            let shunned = home.shunned.has(next.lender, std::time::Instant::now());
            home.help.running && !home.wants(next.lender) && !shunned
        });
        if let Some(room) = books.rooms.get_mut(&next.id) {
            room.built = built;
            room.state = match (&made, room.state) {
                (Ok(()), State::Promised) => State::Booked,
                (Ok(()), _) if good => State::Ready,
                _ => State::Going,
            };
        }
        self.changed.notify_all();
        if let Err(error) = made
            && let Some(home) = books.homes.get_mut(&device)
        {
            // Whoever moves chunks finds no room there then, and goes by the host.
            home.refused(core, next.lender);
            drop(guard);
            core.events.note(format!("no memory on another card: {error}"));
        }
    }
}

impl Books {
    /// Room of that length that is made and for nobody, or is being made.
    pub(super) fn ready(&mut self, device: usize, len: u64) -> Option<u64> {
        let home = self.homes.get(&device)?;
        let find = |state| {
            let fits = |room: &Room| room.home == device && room.len == len && room.state == state;
            let mut rooms = self.rooms.iter();
            rooms.find(|(_, room)| fits(room) && !home.wants(room.lender))
        };
        let (id, _) = find(State::Ready).or_else(|| find(State::Making))?;
        let id = *id;
        if let Some(room) = self.rooms.get_mut(&id) {
            let ready = room.state == State::Ready;
            room.state = if ready { State::Booked } else { State::Promised };
        }
        Some(id)
    }

    /// A chunk of that length has a room that the helper did not make: one less is to be made.
    pub(super) fn made_in_line(&mut self, device: usize, len: u64) {
        if let Some(home) = self.homes.get_mut(&device)
            && let Some(at) = home.help.todo.iter().position(|one| *one == len)
        {
            home.help.todo.remove(at);
        }
    }

    /// What is made ahead on a card, or on any, is for nobody any more.
    pub(super) fn unready(&mut self, device: usize, lender: Option<DeviceUuid>) {
        for room in self.rooms.values_mut() {
            let there = room.home == device && lender.is_none_or(|lender| room.lender == lender);
            if there && room.state == State::Ready {
                room.state = State::Going;
            }
        }
    }

    /// The helper is to end.
    fn stop_help(&mut self, device: usize) {
        if let Some(home) = self.homes.get_mut(&device) {
            home.help = Help::default();
        }
        self.unready(device, None);
    }

    /// What the helper does next; `None`: nothing now.
    fn next_job(&mut self, device: usize, memory: &Arc<dyn DeviceMemory>) -> Option<Job> {
        let home = self.homes.get_mut(&device).filter(|home| home.help.running);
        let Some(home) = home else {
            return Some(Job::End);
        };
        let of = |room: &&Room, states: &[State]| room.home == device && states.contains(&room.state);
        let ahead = self
            .rooms
            .values()
            .filter(|room| of(room, &[State::Ready, State::Making]));
        if ahead.count() < AHEAD
            && let Some(len) = home.help.todo.front().copied()
            && let Some((lender, props)) = home.take_spare(len)
        {
            home.help.todo.pop_front();
            let id = self.enter(device, lender, len, State::Making, memory);
            let memory = Arc::clone(memory);
            return Some(Job::Make(Next {
                id,
                len,
                lender,
                props,
                memory,
            }));
        }
        let going = self.rooms.values().any(|room| of(&room, &[State::Going]));
        going.then_some(Job::Sweep)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let rooms = &self.core.arena.rooms;
        rooms.lock().stop_help(self.device);
        rooms.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
