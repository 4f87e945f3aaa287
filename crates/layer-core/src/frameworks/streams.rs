//! Streams as the pool sees them: numbers, and marks that count what was freed on each.
//!
//! A mark is a count, and costs nothing. An event is recorded only when somebody wants to know how far a stream is; it stands for all
//! marks before it.
//!
//! ```text
//!   by events ──── the program destroys it ───► quiet: its last event tells, or a device that has been quiet since
//!   private ────── the graph is gone ─────────► quiet
//!   waited: who frees has waited for the device before
//! ```
//!
//! # Locks
//! `book` for a look, under no call. `recording` while an event is recorded, which waits for nothing: a stream that is about
//! to be destroyed is not recorded on any more after [`Streams::goes`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_alloc::pool::{Mark, Stream};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::core::Core;
use crate::device::Device;
use crate::streamed::{Fence, FenceState, Fences, StreamKey};

/// How long work is waited for.
const WAIT: Duration = Duration::from_secs(20);
/// Between looks at it.
const PAUSE: Duration = Duration::from_micros(200);

/// Who has waited for the device before every free.
pub(super) const WAITED: Stream = Stream(1);
/// Where nobody knows which stream uses it.
pub(super) const UNKNOWN: Stream = Stream(2);
/// A second one of those: what both use is nobody's before the device has been quiet.
pub(super) const ANY: Stream = Stream(3);
const FIRST: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Events(StreamKey),
    Private,
    Quiet,
}

#[derive(Debug)]
struct One {
    kind: Kind,
    /// The last mark.
    given: u64,
    /// The last mark that an event stands for.
    fenced: u64,
    /// Its work is past this one.
    done: u64,
    fences: Vec<(u64, Fence)>,
}

impl One {
    const fn new(kind: Kind) -> Self {
        Self {
            kind,
            given: 0,
            fenced: 0,
            done: 0,
            fences: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct Book {
    by_key: FxHashMap<StreamKey, Stream>,
    all: FxHashMap<u64, One>,
    next: u64,
}

/// The streams of one device's pool.
#[derive(Debug)]
pub(super) struct Streams {
    book: Mutex<Book>,
    recording: Mutex<()>,
}

impl Streams {
    pub(super) fn new() -> Self {
        let mut all = FxHashMap::default();
        all.insert(UNKNOWN.0, One::new(Kind::Quiet));
        all.insert(ANY.0, One::new(Kind::Quiet));
        Self {
            book: Mutex::new(Book {
                by_key: FxHashMap::default(),
                all,
                next: FIRST,
            }),
            recording: Mutex::new(()),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recording(&self) -> MutexGuard<'_, ()> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a stream.
    pub(super) fn number(&self, key: &StreamKey) -> Stream {
        let mut book = self.book();
        if let Some(known) = book.by_key.get(key) {
            return *known;
        }
        // An own default stream can be reached by its thread alone.
        let kind = if key.thread == 0 {
            Kind::Events(*key)
        } else {
            Kind::Quiet
        };
        let stream = book.add(kind);
        book.by_key.insert(*key, stream);
        stream
    }

    /// A number for blocks that go to nobody else before [`Self::over`].
    pub(super) fn private(&self) -> Stream {
        self.book().add(Kind::Private)
    }

    /// That private one is like others. `false` if it is none.
    pub(super) fn over(&self, stream: Stream) -> bool {
        let mut book = self.book();
        let Some(one) = book
            .all
            .get_mut(&stream.0)
            .filter(|one| one.kind == Kind::Private)
        else {
            return false;
        };
        one.kind = Kind::Quiet;
        // What was freed while it was captured may be used by its last launch.
        one.done = 0;
        true
    }

    /// A mark behind all that the stream has so far.
    pub(super) fn mark(&self, stream: Stream) -> Mark {
        if stream == WAITED {
            return Mark(0);
        }
        match self.book().all.get_mut(&stream.0) {
            Some(one) => {
                one.given += 1;
                Mark(one.given)
            }
            // It has ended, its work done.
            None => Mark(0),
        }
    }

    /// How far the stream is, without waiting.
    pub(super) fn done(&self, core: &Core, stream: Stream) -> Mark {
        if stream == WAITED {
            return Mark(u64::MAX);
        }
        if let Some(fences) = core.streamed.fences().filter(|fences| fences.allowed()) {
            self.record(&*fences, stream);
            self.look(&*fences, stream);
        }
        let book = self.book();
        Mark(book.all.get(&stream.0).map_or(u64::MAX, |one| one.done))
    }

    /// Records an event behind the last mark, if none stands for it.
    fn record(&self, fences: &dyn Fences, stream: Stream) {
        let _recording = self.recording();
        let wanted = {
            let book = self.book();
            match book.all.get(&stream.0) {
                Some(one) if one.given > one.fenced => match one.kind {
                    Kind::Events(key) => Some((key, one.given)),
                    Kind::Private | Kind::Quiet => None,
                },
                _ => None,
            }
        };
        let Some((key, given)) = wanted else { return };
        let Some(fence) = fences.record(&key) else { return };
        let mut book = self.book();
        if let Some(one) = book.all.get_mut(&stream.0) {
            one.fenced = given;
            one.fences.push((given, fence));
        }
    }

    /// Asks about the events there are.
    fn look(&self, fences: &dyn Fences, stream: Stream) {
        let open = match self.book().all.get_mut(&stream.0) {
            Some(one) => std::mem::take(&mut one.fences),
            None => return,
        };
        let (mut passed, mut lost) = (0, false);
        let mut left = Vec::new();
        for (mark, fence) in open {
            match fences.state(fence) {
                FenceState::Passed => passed = passed.max(mark),
                FenceState::Pending => {
                    left.push((mark, fence));
                    continue;
                }
                FenceState::Lost => lost = true,
            }
            fences.recycle(fence);
        }
        let mut book = self.book();
        if let Some(one) = book.all.get_mut(&stream.0) {
            one.done = one.done.max(passed);
            one.fences.append(&mut left);
            if lost && one.fences.is_empty() {
                // What it stood for needs another one.
                one.fenced = one.done;
            }
        }
    }

    /// Waits until the stream is past a mark. `false` if it cannot be waited for now, or not so long.
    pub(super) fn wait(&self, core: &Core, device: &Device, stream: Stream, mark: Mark, now: bool) -> bool {
        let deadline = Instant::now() + WAIT;
        loop {
            if self.done(core, stream) >= mark {
                return true;
            }
            if now || core.is_exiting() || Instant::now() >= deadline {
                return false;
            }
            let fences = core.streamed.fences();
            match self.events(stream) {
                None => return false,
                Some(true) if fences.is_some() => {
                    if fences.is_some_and(|fences| !fences.allowed()) {
                        // Nothing may be asked while a stream is captured.
                        return false;
                    }
                    std::thread::sleep(PAUSE);
                }
                Some(_) => {
                    if core.captures() > 0 || !self.quiesce(core, device) {
                        return false;
                    }
                }
            }
        }
    }

    /// Whether events will tell; `None` if nothing will.
    fn events(&self, stream: Stream) -> Option<bool> {
        let book = self.book();
        let one = book.all.get(&stream.0)?;
        match one.kind {
            Kind::Private => None,
            Kind::Events(_) => Some(true),
            Kind::Quiet => Some(!one.fences.is_empty()),
        }
    }

    /// Waits for all work of the device.
    fn quiesce(&self, core: &Core, device: &Device) -> bool {
        let before = self.snapshot();
        let done = core.outside_capture(|| device.memory.quiesce()).is_ok();
        if done {
            self.past(&before);
        }
        done
    }

    fn snapshot(&self) -> Vec<(u64, u64)> {
        let book = self.book();
        book.all
            .iter()
            .map(|(stream, one)| (*stream, one.given))
            .collect()
    }

    fn past(&self, marks: &[(u64, u64)]) {
        let mut book = self.book();
        for (stream, given) in marks {
            if let Some(one) = book.all.get_mut(stream).filter(|one| one.kind != Kind::Private) {
                one.done = one.done.max(*given);
            }
        }
    }

    /// Nothing runs on the device at this moment.
    pub(super) fn all_past(&self) {
        let now = self.snapshot();
        self.past(&now);
    }

    /// Streams are about to go, or have gone: their handles may mean others from here on. `over`: their work is done.
    pub(super) fn goes(
        &self,
        fences: Option<&Arc<dyn Fences>>,
        which: impl Fn(&StreamKey) -> bool,
        over: bool,
    ) {
        let going: Vec<(StreamKey, Stream)> = {
            let book = self.book();
            let of = book.by_key.iter().filter(|(key, _)| which(key));
            of.map(|(key, stream)| (*key, *stream)).collect()
        };
        for (key, stream) in going {
            if !over && let Some(fences) = fences.filter(|fences| fences.allowed()) {
                self.record(&**fences, stream);
            }
            let _recording = self.recording();
            let mut book = self.book();
            book.by_key.remove(&key);
            if let Some(one) = book.all.get_mut(&stream.0) {
                one.kind = Kind::Quiet;
                if over {
                    one.done = one.given;
                }
            }
        }
    }

    /// Numbers that nobody gets from [`Self::number`] any more and whose work is done.
    pub(super) fn ended(&self) -> Vec<Stream> {
        let book = self.book();
        let reached: FxHashSet<Stream> = book.by_key.values().copied().collect();
        let over = |number: u64, one: &One| {
            one.kind == Kind::Quiet
                && number >= FIRST
                && one.done >= one.given
                && one.fences.is_empty()
                && !reached.contains(&Stream(number))
        };
        let all = book.all.iter().filter(|(number, one)| over(**number, one));
        all.map(|(number, _)| Stream(*number)).collect()
    }

    /// Such a number is not in use any more.
    pub(super) fn forget(&self, stream: Stream) {
        self.book().all.remove(&stream.0);
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.book().all.len()
    }

    /// Whether it has any stream of those.
    pub(super) fn knows(&self, which: impl Fn(&StreamKey) -> bool) -> bool {
        self.book().by_key.keys().any(which)
    }
}

impl Book {
    fn add(&mut self, kind: Kind) -> Stream {
        let number = self.next;
        self.next += 1;
        self.all.insert(number, One::new(kind));
        Stream(number)
    }
}
