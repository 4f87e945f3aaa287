//! Threads for what may block: NVML, the pages of the arena, the disk. They answer by a channel and a wake-up.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use crate::arena::Prepared;
use crate::nvml::{Card, Nvml, NvmlError};
use crate::statefile::StateFile;

/// An eventfd that ends the driver's wait.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    pub(crate) fn wake(&self) {
        // Full means that a wake-up is on its way already.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a worker has to say.
#[derive(Debug)]
pub(crate) enum FromWorker {
    /// The cards, or why nobody knows; read after all pokes up to this number, from that time on.
    Cards(Result<Vec<Card>, NvmlError>, u64, Instant),
    /// A segment that was prepared, or why not.
    Segment(Prepared),
    /// What the disk tier did.
    Disk(crate::disk::Done),
    /// What is equal and what is not.
    Equal(crate::equal::Done),
    /// The event log works again or does not; how many records it lost so far.
    Log { trouble: Option<String>, lost: u64 },
    /// This write of the state file, and all before it, is done or could not be.
    State {
        sequence: u64,
        result: Result<(), String>,
    },
    /// A line of a helper for the driver's checkpoint, or its end.
    Helper {
        helper: u64,
        line: Option<crate::checkpoint::Line>,
    },
    /// Somebody was notified of a rule, or could not be.
    Notified { trouble: Option<String> },
    /// Somebody wants the daemon to end.
    Stop,
}

/// Where workers answer.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    sender: Sender<FromWorker>,
    waker: Waker,
}

impl Answers {
    pub(crate) fn new(waker: Waker) -> (Self, Receiver<FromWorker>) {
        let (sender, receiver) = channel();
        (Self { sender, waker }, receiver)
    }

    /// Returns false if the driver is gone.
    pub(crate) fn send(&self, what: FromWorker) -> bool {
        let sent = self.sender.send(what).is_ok();
        self.waker.wake();
        sent
    }
}

/// A thread that ends when its last sender is dropped, and is waited for then.
#[derive(Debug)]
pub(crate) struct Worker<T> {
    sender: Option<Sender<T>>,
    threads: Vec<JoinHandle<()>>,
    /// A worker that may hang in foreign code is not waited for.
    wait: bool,
}

impl<T: Send + 'static> Worker<T> {
    pub(crate) fn start(
        name: &str,
        wait: bool,
        run: impl FnOnce(Receiver<T>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(receiver))?;
        Ok(Self {
            sender: Some(sender),
            threads: vec![thread],
            wait,
        })
    }

    /// `count` threads that share one queue.
    pub(crate) fn pool(
        name: &str,
        count: usize,
        run: impl Fn(T) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = channel::<T>();
        let (receiver, run) = (Arc::new(std::sync::Mutex::new(receiver)), Arc::new(run));
        let threads = (0..count.max(1))
            .map(|i| {
                let (receiver, run) = (receiver.clone(), run.clone());
                std::thread::Builder::new()
                    .name(format!("{name}-{i}"))
                    .spawn(move || {
                        loop {
                            // Only waiting happens under this lock; a poisoned one means that a sibling died, not that
                            // the queue is wrong.
                            let job = receiver
                                .lock()
                                .unwrap_or_else(std::sync::PoisonError::into_inner)
                                .recv();
                            match job {
                                Ok(job) => run(job),
                                Err(_) => return,
                            }
                        }
                    })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            sender: Some(sender),
            threads,
            wait: true,
        })
    }

    pub(crate) fn send(&self, job: T) -> bool {
        self.sender
            .as_ref()
            .is_some_and(|sender| sender.send(job).is_ok())
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        drop(self.sender.take());
        if self.wait {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

/// Asks NVML once a second, and at once when poked, by numbers that grow.
pub(crate) fn watch_cards(path: std::path::PathBuf, answers: Answers) -> std::io::Result<Worker<u64>> {
    Worker::start("ebb-nvml", false, move |pokes: Receiver<u64>| {
        let mut poked = 0;
        let (mut nvml, mut suspects) = (None, crate::suspect::Memory::default());
        loop {
            if nvml.is_none() {
                match Nvml::load(&path) {
                    Ok(loaded) => nvml = Some(loaded),
                    Err(e) => {
                        if !answers.send(FromWorker::Cards(Err(e), poked, Instant::now())) {
                            return;
                        }
                    }
                }
            }
            if let Some(loaded) = &nvml {
                let began = Instant::now();
                let mut sample = loaded.sample();
                let failed = sample.is_err();
                for card in sample.iter_mut().flatten() {
                    let listed = card.processes.iter().flatten().map(|(pid, _)| *pid);
                    card.facts = suspects.look(listed);
                }
                if !answers.send(FromWorker::Cards(sample, poked, began)) {
                    return;
                }
                // After an error (driver unloaded, say) begin anew.
                if failed {
                    nvml = None;
                }
            }
            // A driver that is not there will hardly come within the second.
            let pause = Duration::from_secs(if nvml.is_some() { 1 } else { 5 });
            match pokes.recv_timeout(pause) {
                Ok(number) => poked = pokes.try_iter().last().unwrap_or(number),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    })
}

/// Writes the state file, always the newest of what is waiting.
pub(crate) fn write_state(path: std::path::PathBuf, answers: Answers) -> std::io::Result<Worker<StateFile>> {
    Worker::start("ebb-state", true, move |queue: Receiver<StateFile>| {
        while let Ok(mut state) = queue.recv() {
            while let Ok(newer) = queue.try_recv() {
                state = newer;
            }
            let result = state.write(&path).map_err(|e| e.to_string());
            answers.send(FromWorker::State {
                sequence: state.sequence,
                result,
            });
        }
    })
}
