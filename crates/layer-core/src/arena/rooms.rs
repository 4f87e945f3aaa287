//! Rooms on other cards, for chunks that left this one.
//!
//! ```text
//!            book            build                let_go          sweep
//!   lent ──────────> booked ───────> holds bytes ────────> going ───────> gone, told to the daemon
//!    │ not needed       │ failed        │ a copy that may run for ever
//!    └─> given back     └─> given back  └─> lost: never used, never given back         (or stuck, and tried again)
//! ```
//! A room is memory on another card of this process's own, which this card reads and writes: it needs no context there, and goes
//! with the process. A chunk knows where its bytes are by pieces; a room is one piece, with [`ROOM`] in its segment's number,
//! so that whoever drops a chunk's copy need not know the difference. The daemon lends the bytes, and may want them back for
//! those who live on that card: then the owner thread of this card moves chunks on to host memory
//! ([`crate::residency`], *rehome*), or they come home if there is room for them. Rooms are made ahead, and taken apart, by a thread beside
//! the copies ([`helper`]).
//!
//! # Locks
//! The state here may be taken under a device's lock and under the arena's, and the link's outbox and the events under it. No
//! driver call is made under it.

mod helper;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_alloc::Piece;
use ebb_device::{DeviceError, DeviceMemory, Direction, Grant, Handle, Marker, Props};
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{LodgedAt, feature};
use ebb_units::{Bytes, DeviceUuid};

use super::shunned::Shunned;
use crate::core::Core;
use crate::device::Device;

/// In the number of a segment: it is a room. The daemon's own numbers never get so far.
const ROOM: u64 = 1 << 63;
/// After a chunk could not be moved out of its room.
const AGAIN: Duration = Duration::from_secs(1);

/// Whether bytes lie on another card.
pub(super) fn is_room(piece: &Piece) -> bool {
    piece.segment & ROOM != 0
}

/// The room of a copy, if that is where it is.
pub(crate) fn room_of(pieces: &[Piece]) -> Option<&Piece> {
    pieces.first().filter(|piece| is_room(piece))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The helper makes it at this moment.
    Making,
    /// The same, and a chunk waits for it.
    Promised,
    /// It is made, and for no chunk yet.
    Ready,
    Booked,
    Holds,
    Going,
    /// Somebody takes it apart at this moment.
    Leaving,
    /// The driver would not take it back: tried again after a while, and at any sweep before.
    Stuck,
    Lost,
}

/// What the driver has of a room.
#[derive(Clone, Copy, Debug, Default)]
struct Built {
    at: Option<u64>,
    handle: Option<Handle>,
    mapped: bool,
}

#[derive(Debug)]
struct Room {
    home: usize,
    lender: DeviceUuid,
    len: u64,
    state: State,
    built: Built,
    /// A copy from it failed: its bytes go through host memory.
    doubted: bool,
    memory: Arc<dyn DeviceMemory>,
}

/// What a device has elsewhere.
#[derive(Debug, Default)]
struct Home {
    /// The daemon's number of the device, while it serves it.
    slot: Option<u32>,
    lenders: BTreeMap<DeviceUuid, Props>,
    /// Those of them that a copy failed to or from.
    shunned: Shunned,
    /// Those that the daemon knows of.
    told: Vec<DeviceUuid>,
    /// The daemon was asked and has not answered.
    asking: bool,
    /// An eviction is under way that has use for what is lent.
    evicting: bool,
    /// Lent, and in no room.
    spare: BTreeMap<DeviceUuid, u64>,
    /// Wanted back.
    wanted: BTreeMap<DeviceUuid, u64>,
    /// Nothing is moved out of rooms before.
    not_before: Option<Instant>,
    help: helper::Help,
}

impl Home {
    fn unserved(&mut self) {
        (self.slot, self.asking) = (None, false);
        self.spare.clear();
        self.wanted.clear();
    }

    /// The lenders that bytes may go to now.
    fn open(&self, now: Instant) -> Vec<DeviceUuid> {
        let lenders = self.lenders.keys().copied();
        lenders.filter(|lender| !self.shunned.has(*lender, now)).collect()
    }

    /// Has the daemon know to whom bytes may go now. Whether there is anybody.
    fn tell_open(&mut self, core: &Core, device: u32) -> bool {
        let open = self.open(Instant::now());
        if open.is_empty() {
            return false;
        }
        if open != self.told {
            self.told.clone_from(&open);
            core.link.send(ToDaemon::LodgingLenders {
                device,
                lenders: open,
            });
        }
        true
    }

    fn wants(&self, lender: DeviceUuid) -> bool {
        self.wanted.get(&lender).is_some_and(|bytes| *bytes > 0)
    }

    /// Room for a chunk, of what is lent: on which card, and what memory there is made with.
    fn take_spare(&mut self, len: u64) -> Option<(DeviceUuid, Props)> {
        let wanted = &self.wanted;
        let fits = |(lender, spare): &(&DeviceUuid, &mut u64)| {
            **spare >= len && wanted.get(*lender).is_none_or(|bytes| *bytes == 0)
        };
        let (lender, spare) = self.spare.iter_mut().find(fits)?;
        let props = self.lenders.get(lender)?;
        *spare -= len;
        Some((*lender, *props))
    }

    /// That card does not give what it lent: no more is tried there for now.
    fn refused(&mut self, core: &Core, lender: DeviceUuid) {
        let spare = self.spare.remove(&lender).unwrap_or(0);
        self.left(core, lender, spare);
    }

    /// So much has been left. Told under the lock, so that no account of all that is held crosses it. Without a connection nobody
    /// needs to hear it: the next daemon hears what is held.
    fn left(&mut self, core: &Core, lender: DeviceUuid, bytes: u64) {
        if let Some(wanted) = self.wanted.get_mut(&lender) {
            *wanted = wanted.saturating_sub(bytes);
        }
        if let Some(device) = self.slot.filter(|_| bytes > 0) {
            core.link.send(ToDaemon::LodgingLeft {
                device,
                lender,
                bytes: Bytes(bytes),
            });
        }
    }
}

#[derive(Debug, Default)]
struct Books {
    homes: BTreeMap<usize, Home>,
    rooms: BTreeMap<u64, Room>,
    next: u64,
    /// What the driver would not take back is not tried again before then.
    stuck_until: Option<Instant>,
    /// Bytes that went to rooms, and that moved on from them to host memory, so far.
    taken: u64,
    moved_on: u64,
}

/// The rooms of a process.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    books: Mutex<Books>,
    /// For the helper.
    changed: Condvar,
}

/// Sums for the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RoomSums {
    pub(crate) held: u64,
    pub(crate) lost: u64,
    pub(crate) wanted: u64,
    pub(crate) taken: u64,
    pub(crate) moved_on: u64,
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device is new: which other cards it reaches.
    pub(crate) fn attach(&self, device: &Device) {
        let lenders: BTreeMap<_, _> = device.memory.lenders().into_iter().collect();
        if !lenders.is_empty() {
            self.lock().homes.entry(device.index).or_default().lenders = lenders;
        }
    }

    /// The daemon knows the device: it hears which cards it reaches, and what it has there.
    pub(crate) fn met(&self, core: &Core, device: &Device, slot: u32) {
        if !core.link.can(feature::LODGING) {
            return;
        }
        let mut books = self.lock();
        let Some(home) = books.homes.get_mut(&device.index) else {
            return;
        };
        home.slot = Some(slot);
        home.asking = false;
        home.spare.clear();
        home.wanted.clear();
        let lenders = home.open(Instant::now());
        home.told.clone_from(&lenders);
        let mut held: BTreeMap<DeviceUuid, u64> = BTreeMap::new();
        for room in books.rooms.values().filter(|room| room.home == device.index) {
            *held.entry(room.lender).or_default() += room.len;
        }
        let held = held.into_iter().map(|(lender, bytes)| LodgedAt {
            lender,
            bytes: Bytes(bytes),
        });
        core.link.send(ToDaemon::LodgingLenders {
            device: slot,
            lenders,
        });
        core.link.send(ToDaemon::LodgingHeld {
            device: slot,
            held: held.collect(),
        });
    }

    /// The daemon is gone: nobody lends, and nobody wants anything back.
    pub(crate) fn alone(&self) {
        for home in self.lock().homes.values_mut() {
            home.unserved();
        }
    }

    /// A device goes, with all that it has.
    pub(crate) fn detach(&self, core: &Core, device: usize) {
        self.sweep(core);
        if let Some(home) = self.lock().homes.get_mut(&device) {
            home.unserved();
        }
    }

    /// An eviction of so many bytes begins: how many of them have room elsewhere. Waits a moment for the daemon's answer.
    pub(crate) fn ask(&self, core: &Core, device: &Device, bytes: u64) -> u64 {
        if bytes == 0 || !core.link.can(feature::LODGING) {
            return 0;
        }
        {
            let mut books = self.lock();
            let Some(home) = books.homes.get_mut(&device.index) else {
                return 0;
            };
            let Some(slot) = home.slot else {
                return 0;
            };
            if !home.tell_open(core, slot) {
                return 0;
            }
            home.evicting = true;
            if !std::mem::replace(&mut home.asking, true) {
                core.link.send(ToDaemon::LodgingAsk {
                    device: slot,
                    bytes: Bytes(bytes),
                });
            }
        }
        let deadline = Instant::now() + core.config.lodging_wait;
        let mut state = device.lock();
        loop {
            let (asking, spare) = {
                let books = self.lock();
                let home = books.homes.get(&device.index);
                let spare = home.map_or(0, |home| home.spare.values().sum());
                (home.is_some_and(|home| home.asking), spare)
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if !asking || left.is_zero() || core.is_exiting() {
                return spare;
            }
            state = device.wait_for(state, left);
        }
    }

    /// The eviction is over: what was lent and not used goes back.
    pub(crate) fn end(&self, core: &Core, device: &Device) {
        if let Some(home) = self.lock().homes.get_mut(&device.index) {
            home.evicting = false;
            for (lender, bytes) in std::mem::take(&mut home.spare) {
                home.left(core, lender, bytes);
            }
        }
    }

    /// The daemon's answer.
    pub(crate) fn lent(&self, core: &Core, device: &Device, lender: DeviceUuid, bytes: u64) {
        {
            let mut books = self.lock();
            let home = books.homes.entry(device.index).or_default();
            home.asking = false;
            if home.evicting && home.open(Instant::now()).contains(&lender) {
                *home.spare.entry(lender).or_default() += bytes;
            } else {
                // Too late, or a card that nobody here knows.
                home.left(core, lender, bytes);
            }
        }
        device.wake();
    }

    /// The daemon wants room back.
    pub(crate) fn wanted(&self, core: &Core, device: &Device, lender: DeviceUuid, bytes: u64) {
        {
            let mut guard = self.lock();
            let books = &mut *guard;
            let Some(home) = books.homes.get_mut(&device.index) else {
                return;
            };
            let there = books.rooms.values();
            let there = there.filter(|room| room.home == device.index && room.lender == lender);
            let held: u64 = there.map(|room| room.len).sum();
            let spare = home.spare.get(&lender).copied().unwrap_or(0);
            // What is on its way there already is not wanted twice.
            let wanted = home.wanted.entry(lender).or_default();
            *wanted = wanted.saturating_add(bytes).min(held + spare);
            home.not_before = None;
            let spare = home.spare.entry(lender).or_default();
            let unused = bytes.min(*spare);
            *spare -= unused;
            home.left(core, lender, unused);
            books.unready(device.index, Some(lender));
        }
        self.changed.notify_all();
        device.wake();
    }

    /// Room for a chunk, on one card; it is made by [`Self::build`]. Takes no driver call.
    pub(crate) fn book(&self, device: &Device, len: u64) -> Option<Piece> {
        let mut books = self.lock();
        let id = match books.ready(device.index, len) {
            Some(id) => id,
            None => {
                let (lender, _) = books.homes.get_mut(&device.index)?.take_spare(len)?;
                books.made_in_line(device.index, len);
                books.enter(device.index, lender, len, State::Booked, &device.memory)
            }
        };
        // One more may be made ahead.
        self.changed.notify_all();
        Some(Piece {
            segment: id,
            offset: 0,
            len,
        })
    }

    /// Makes a booked room, if it is not made.
    ///
    /// # Errors
    /// The driver's. The room is gone, and no more is lent by that card for now.
    pub(crate) fn build(&self, core: &Core, device: &Device, piece: &Piece) -> Result<(), DeviceError> {
        let found = {
            let is_promised = |books: &mut Books| {
                let room = books.rooms.get(&piece.segment);
                room.is_some_and(|room| room.state == State::Promised)
            };
            let mut books = self.lock();
            let promised = is_promised(&mut books);
            if promised {
                // As long as the driver's calls for it take, which the helper is in the middle of.
                let waited = self.changed.wait_while(books, is_promised);
                books = waited.unwrap_or_else(PoisonError::into_inner);
            }
            let Books {
                rooms, homes, taken, ..
            } = &mut *books;
            let room = rooms.get_mut(&piece.segment);
            if let Some(room) = room.filter(|room| room.state == State::Booked && room.built.mapped) {
                room.state = State::Holds;
                *taken += piece.len;
                return Ok(());
            }
            if promised {
                return Err(DeviceError::OutOfMemory);
            }
            let room = rooms.get(&piece.segment);
            room.and_then(|room| {
                let home = homes.get(&room.home)?;
                Some((room.lender, *home.lenders.get(&room.lender)?))
            })
        };
        let (lender, props) = found.ok_or(DeviceError::Gone)?;
        let mut built = Built::default();
        let result = build(&*device.memory, piece.len, &props, &mut built);
        let mut books = self.lock();
        if let Some(room) = books.rooms.get_mut(&piece.segment) {
            room.built = built;
            room.state = if result.is_ok() {
                State::Holds
            } else {
                State::Going
            };
        }
        match result {
            Ok(()) => {
                books.taken += piece.len;
                Ok(())
            }
            Err(error) => {
                if let Some(home) = books.homes.get_mut(&device.index) {
                    home.refused(core, lender);
                }
                drop(books);
                self.sweep(core);
                Err(error)
            }
        }
    }

    /// Where a room is, for copies.
    fn at(&self, piece: &Piece) -> Option<u64> {
        let books = self.lock();
        books.rooms.get(&piece.segment)?.built.at
    }

    /// Enqueues copies of the given runs of a chunk at `at` to its room, or from it, and a marker behind them.
    ///
    /// # Errors
    /// The driver's; some may be under way.
    pub(crate) fn enqueue(
        &self,
        memory: &dyn DeviceMemory,
        direction: Direction,
        at: u64,
        piece: &Piece,
        runs: &[(u64, u64)],
    ) -> Result<Marker, DeviceError> {
        let room = self.at(piece).ok_or(DeviceError::Gone)?;
        for (run, len) in runs {
            let (here, there) = (at + run, room + run);
            match direction {
                Direction::Out => memory.copy_between(direction, there, here, *len)?,
                Direction::In => memory.copy_between(direction, here, there, *len)?,
            }
        }
        memory.mark(direction)
    }

    /// Where the bytes of a room can be copied from to the host.
    pub(crate) fn address(&self, piece: &Piece) -> Option<u64> {
        self.at(piece)
    }

    /// Nobody needs these bytes any more: the room goes at the next [`Self::sweep`].
    pub(crate) fn let_go(&self, piece: &Piece) {
        if let Some(room) = self.lock().rooms.get_mut(&piece.segment) {
            // What is being made is its maker's until it is made.
            let promised = room.state == State::Promised;
            room.state = if promised { State::Making } else { State::Going };
        }
    }

    /// Copies to or from it may be under way for ever.
    pub(crate) fn lose(&self, piece: &Piece) {
        if let Some(room) = self.lock().rooms.get_mut(&piece.segment) {
            room.state = State::Lost;
        }
    }

    /// A copy from a room failed: its bytes take the other way.
    pub(crate) fn doubt(&self, piece: &Piece) {
        let mut guard = self.lock();
        let books = &mut *guard;
        if let Some(room) = books.rooms.get_mut(&piece.segment) {
            room.doubted = true;
            if let Some(home) = books.homes.get_mut(&room.home) {
                home.not_before = None;
            }
        }
    }

    /// A copy to a room failed, or from one: nothing goes to that card for a while. What is lent there and not used goes back.
    pub(crate) fn shun(&self, core: &Core, piece: &Piece) {
        let mut guard = self.lock();
        let books = &mut *guard;
        if let Some(room) = books.rooms.get(&piece.segment)
            && let Some(home) = books.homes.get_mut(&room.home)
        {
            home.shunned.failed(room.lender, Instant::now());
            home.refused(core, room.lender);
            let (home, lender) = (room.home, room.lender);
            books.unready(home, Some(lender));
            self.changed.notify_all();
        }
    }

    /// A copy to a room succeeded.
    pub(crate) fn worked(&self, piece: &Piece) {
        let mut guard = self.lock();
        let books = &mut *guard;
        if let Some(room) = books.rooms.get(&piece.segment)
            && let Some(home) = books.homes.get_mut(&room.home)
        {
            home.shunned.worked(room.lender, Instant::now());
        }
    }

    /// Gives back what nobody needs any more. Makes driver calls: no lock may be held.
    pub(crate) fn sweep(&self, core: &Core) {
        for room in self.lock().rooms.values_mut() {
            if room.state == State::Stuck {
                room.state = State::Going;
            }
        }
        loop {
            let Some((id, len, mut built, memory)) = ({
                let mut books = self.lock();
                let going = books
                    .rooms
                    .iter_mut()
                    .find(|(_, room)| room.state == State::Going);
                going.map(|(id, room)| {
                    room.state = State::Leaving;
                    (*id, room.len, room.built, Arc::clone(&room.memory))
                })
            }) else {
                return;
            };
            let torn = tear(&*memory, len, &mut built);
            let mut guard = self.lock();
            let books = &mut *guard;
            if let Err(error) = torn {
                core.events.note(format!(
                    "a room on another card stays: {error}; tried again later"
                ));
                if let Some(room) = books.rooms.get_mut(&id) {
                    (room.built, room.state) = (built, State::Stuck);
                    books.stuck_until = Some(Instant::now() + AGAIN);
                }
            } else if let Some(room) = books.rooms.remove(&id)
                && let Some(home) = books.homes.get_mut(&room.home)
            {
                home.left(core, room.lender, room.len);
            }
        }
    }

    /// Whether there is something to do for the owner of a device: rooms to give back, or to move out of.
    pub(crate) fn has_work(&self, device: usize) -> bool {
        let books = self.lock();
        let now = Instant::now();
        let due = books.stuck_until.is_none_or(|at| now >= at);
        let going = |room: &Room| {
            let goes = room.state == State::Going || due && room.state == State::Stuck;
            goes && room.home == device
        };
        books.rooms.values().any(going) || books.to_leave(device, now).is_some()
    }

    /// Whether a room is to be left.
    pub(crate) fn is_to_leave(&self, piece: &Piece) -> bool {
        let books = self.lock();
        books.rooms.get(&piece.segment).is_some_and(|room| {
            let home = books.homes.get(&room.home);
            room.doubted || home.is_some_and(|home| home.wants(room.lender))
        })
    }

    /// When moving out of rooms, or giving back one that the driver would not take, is to be tried again, if there is such a thing.
    pub(crate) fn next_try(&self, device: usize) -> Option<Duration> {
        let books = self.lock();
        let moves = books.homes.get(&device).and_then(|home| {
            let later = home.not_before? + Duration::from_millis(1);
            books.to_leave(device, later).map(|_| later)
        });
        // Whoever lends may wait for it, and nothing else need happen here.
        let stuck = |room: &Room| room.state == State::Stuck && room.home == device;
        let stays = books.stuck_until.filter(|_| books.rooms.values().any(stuck));
        let next = moves.into_iter().chain(stays).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// A chunk could not be moved out of its room: not again for a while.
    pub(crate) fn put_off(&self, device: usize) {
        if let Some(home) = self.lock().homes.get_mut(&device) {
            home.not_before = Some(Instant::now() + AGAIN);
        }
    }

    /// So many bytes moved on to host memory.
    pub(crate) fn moved_on(&self, bytes: u64) {
        self.lock().moved_on += bytes;
    }

    /// Whether a chunk waits for a room that the helper is making.
    #[cfg(test)]
    pub(crate) fn is_any_promised(&self) -> bool {
        let books = self.lock();
        books.rooms.values().any(|room| room.state == State::Promised)
    }

    /// Whether anything lies on other cards.
    pub(crate) fn any(&self) -> bool {
        !self.lock().rooms.is_empty()
    }

    pub(crate) fn sums(&self) -> RoomSums {
        let books = self.lock();
        let of = |lost: bool| {
            let rooms = books.rooms.values();
            let is_lost = |room: &&Room| matches!(room.state, State::Lost | State::Stuck) == lost;
            let some = rooms.filter(is_lost);
            some.map(|room| room.len).sum()
        };
        let wanted = books.homes.values().flat_map(|home| home.wanted.values());
        RoomSums {
            held: of(false),
            lost: of(true),
            wanted: wanted.sum(),
            taken: books.taken,
            moved_on: books.moved_on,
        }
    }
}

impl Books {
    /// A room that is not there yet, of bytes that were taken of what is lent.
    fn enter(
        &mut self,
        home: usize,
        lender: DeviceUuid,
        len: u64,
        state: State,
        memory: &Arc<dyn DeviceMemory>,
    ) -> u64 {
        self.next += 1;
        let id = self.next | ROOM;
        let memory = Arc::clone(memory);
        self.rooms.insert(
            id,
            Room {
                home,
                lender,
                len,
                state,
                built: Built::default(),
                doubted: false,
                memory,
            },
        );
        id
    }

    /// A room that a chunk is to move out of now.
    fn to_leave(&self, device: usize, now: Instant) -> Option<u64> {
        let home = self.homes.get(&device)?;
        if home.not_before.is_some_and(|at| now < at) {
            return None;
        }
        let leaves = |room: &Room| {
            let holds = room.home == device && room.state == State::Holds;
            holds && (room.doubted || home.wants(room.lender))
        };
        let found = self.rooms.iter().find(|(_, room)| leaves(room));
        found.map(|(id, _)| *id)
    }
}

/// Makes memory on another card and maps it here, for this device to use. On an error nothing is left, or what is noted in `built`.
fn build(memory: &dyn DeviceMemory, len: u64, props: &Props, built: &mut Built) -> Result<(), DeviceError> {
    let made = (|| {
        let at = memory.reserve(len, 0)?;
        built.at = Some(at);
        let handle = memory.create_as(len, props)?;
        built.handle = Some(handle);
        memory.map_as(at, len, handle)?;
        built.mapped = true;
        let grant = Grant {
            location: memory.location(),
            flags: Grant::READ_WRITE,
        };
        memory.grant(at, len, &[grant])
    })();
    if made.is_err() {
        // What does not go now is tried again by the sweep.
        let _ = tear(memory, len, built);
    }
    made
}

/// Takes a room apart, as far as it is there.
fn tear(memory: &dyn DeviceMemory, len: u64, built: &mut Built) -> Result<(), DeviceError> {
    if let Some(at) = built.at.filter(|_| built.mapped) {
        memory.unmap_as(at, len)?;
        built.mapped = false;
    }
    if let Some(handle) = built.handle {
        memory.release(handle)?;
        built.handle = None;
    }
    if let Some(at) = built.at {
        memory.free_reservation(at, len)?;
        built.at = None;
    }
    Ok(())
}
