//! A program that uses the GPU as it is told on standard input, one command a line, one answer a line.
//!
//! ```text
//! open [DEVICE]        alloc NAME BYTES    free NAME          fill NAME SEED       check NAME SEED
//! info                 total               range NAME         spin MS              sync
//! write NAME SEED      read NAME SEED      query              asyncalloc NAME N    asyncfree NAME
//! graph NAME SEED      launch NAME SEED    rawfree ADDRESS    fork                 closefds
//! mapalloc NAME BYTES  mapfree NAME
//! handle NAME [OFFSET] ipcopen NAME BYTES 8 WORDS               ipcclose NAME        attribute NAME N
//! event NAME           eventopen NAME 8 WORDS                   record NAME          wait NAME
//! syncmemops NAME 0|1  dmabuf NAME BYTES   dmaread NAME SEED    retain NAME          ipcself NAME
//! peer DEVICE 0|1      allocon NAME BYTES DEVICE                checkpoint WHAT PID
//! ```
//! Answers are `ok [numbers]` or `err CODE`. The first command that needs the driver opens device 0.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::os::fd::FromRawFd;

use ebb_tests::{Attribute, Cuda, CudaError, IpcHandle};

struct Script {
    cuda: Option<Cuda>,
    memory: HashMap<String, (u64, u64)>,
    events: HashMap<String, u64>,
    buffers: HashMap<String, std::fs::File>,
}

/// Bytes of a handle that the program maps by itself.
const UNIT: u64 = 2 << 20;

fn main() {
    let mut script = Script {
        cuda: None,
        memory: HashMap::new(),
        events: HashMap::new(),
        buffers: HashMap::new(),
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match script.obey(&line) {
            Ok(numbers) => numbers
                .iter()
                .fold("ok".to_owned(), |text, n| format!("{text} {n}")),
            Err(CudaError(code)) => format!("err {code}"),
        };
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

impl Script {
    fn cuda(&mut self) -> Result<&Cuda, CudaError> {
        if self.cuda.is_none() {
            self.cuda = Some(Cuda::open(0)?);
        }
        Ok(self.cuda.as_ref().expect("just opened"))
    }

    fn obey(&mut self, line: &str) -> Result<Vec<u64>, CudaError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| -> u64 { words.get(at).and_then(|w| w.parse().ok()).unwrap_or(0) };
        let seed = u32::try_from(number(2) & 0xffff_ffff).unwrap_or(0);
        let name = words.get(1).copied().unwrap_or_default();
        let (pointer, bytes) = self.memory.get(name).copied().unwrap_or((0, 0));
        match words.first().copied().unwrap_or_default() {
            "open" => {
                self.cuda = Some(Cuda::open(i32::try_from(number(1)).unwrap_or(0))?);
                Ok(vec![])
            }
            "alloc" => {
                let pointer = self.cuda()?.alloc(number(2))?;
                self.memory.insert(name.into(), (pointer, number(2)));
                Ok(vec![pointer])
            }
            "asyncalloc" => {
                let pointer = self.cuda()?.alloc_async(number(2))?;
                self.memory.insert(name.into(), (pointer, number(2)));
                Ok(vec![pointer])
            }
            "mapalloc" => {
                let pointer = self.cuda()?.alloc_mapped(number(2), UNIT)?;
                self.memory.insert(name.into(), (pointer, number(2)));
                Ok(vec![pointer])
            }
            "mapfree" => {
                self.cuda()?.free_mapped(pointer, bytes, UNIT)?;
                self.memory.remove(name);
                Ok(vec![])
            }
            "free" => {
                self.cuda()?.free(pointer)?;
                self.memory.remove(name);
                Ok(vec![])
            }
            "asyncfree" => {
                self.cuda()?.free_async(pointer)?;
                self.memory.remove(name);
                Ok(vec![])
            }
            "rawfree" => self.cuda()?.free(number(1)).map(|()| vec![]),
            "fill" => {
                let cuda = self.cuda()?;
                cuda.launch_fill(pointer, bytes, seed, 0)?;
                cuda.synchronize()?;
                Ok(vec![])
            }
            "launch" => self.cuda()?.launch_fill(pointer, bytes, seed, 0).map(|()| vec![]),
            "graph" => self.cuda()?.capture_fill(pointer, bytes, seed).map(|()| vec![]),
            "check" => Ok(vec![self.cuda()?.count_wrong(pointer, bytes, seed, 0)?]),
            "write" => {
                let data = pattern(bytes, seed);
                self.cuda()?.write(pointer, &data)?;
                Ok(vec![])
            }
            "read" => {
                let mut data = vec![0; usize::try_from(bytes).unwrap_or(0)];
                self.cuda()?.read(pointer, &mut data)?;
                let wrong = data
                    .iter()
                    .zip(pattern(bytes, seed))
                    .filter(|(a, b)| **a != *b)
                    .count();
                Ok(vec![wrong as u64])
            }
            "info" => self.cuda()?.info().map(|(free, total)| vec![free, total]),
            "total" => self.cuda()?.device_total().map(|total| vec![total]),
            "range" => self
                .cuda()?
                .address_range(pointer)
                .map(|(base, size)| vec![base, size]),
            "spin" => self.cuda()?.launch_spin(number(1)).map(|()| vec![]),
            "sync" => self.cuda()?.synchronize().map(|()| vec![]),
            "query" => self.cuda()?.query().map(|()| vec![]),
            "fork" => Ok(vec![fork_and_use(self.cuda.as_ref())]),
            "closefds" => {
                // As programs do that close what they do not know. The driver's own files are spared: without them it is
                // gone, with ebb or without.
                for fd in 3..4096 {
                    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
                    if link.is_ok_and(|to| to.to_string_lossy().starts_with("socket:")) {
                        // SAFETY: nobody in this program uses the descriptor; those of libraries are their own risk, which
                        // is the point.
                        unsafe { libc::close(fd) };
                    }
                }
                Ok(vec![])
            }
            _ => self.share(&words),
        }
    }

    /// Commands about sharing.
    fn share(&mut self, words: &[&str]) -> Result<Vec<u64>, CudaError> {
        let number = |at: usize| -> u64 { words.get(at).and_then(|w| w.parse().ok()).unwrap_or(0) };
        let handle_at = |at: usize| -> IpcHandle { std::array::from_fn(|i| number(at + i)) };
        let name = words.get(1).copied().unwrap_or_default();
        let (pointer, bytes) = self.memory.get(name).copied().unwrap_or((0, 0));
        let event = self.events.get(name).copied().unwrap_or(0);
        match words.first().copied().unwrap_or_default() {
            "handle" => self.cuda()?.ipc_handle(pointer + number(2)).map(|h| h.to_vec()),
            "ipcopen" => {
                let pointer = self.cuda()?.ipc_open(handle_at(3))?;
                self.memory.insert(name.into(), (pointer, number(2)));
                Ok(vec![pointer])
            }
            "ipcclose" => self.cuda()?.ipc_close(pointer).map(|()| vec![]),
            "ipcself" => {
                let handle = self.cuda()?.ipc_handle(pointer)?;
                self.cuda()?.ipc_open(handle).map(|pointer| vec![pointer])
            }
            "event" => {
                let (event, handle) = self.cuda()?.ipc_event()?;
                self.events.insert(name.into(), event);
                Ok(handle.to_vec())
            }
            "eventopen" => {
                let event = self.cuda()?.ipc_open_event(handle_at(2))?;
                self.events.insert(name.into(), event);
                Ok(vec![])
            }
            "record" => self.cuda()?.record(event).map(|()| vec![]),
            "wait" => self.cuda()?.wait_event(event).map(|()| vec![]),
            "attribute" => {
                let attribute = Attribute(i32::try_from(number(2)).unwrap_or(0));
                self.cuda()?
                    .attribute(pointer, attribute)
                    .map(|value| vec![value])
            }
            "syncmemops" => self
                .cuda()?
                .set_sync_memops(pointer, number(2) != 0)
                .map(|()| vec![]),
            "dmabuf" => {
                let fd = self.cuda()?.dma_buf(pointer, number(2))?;
                // SAFETY: the driver made the descriptor for this call.
                let file = unsafe { std::fs::File::from(std::os::fd::OwnedFd::from_raw_fd(fd)) };
                self.buffers.insert(name.into(), file);
                Ok(vec![])
            }
            "retain" => self.cuda()?.retain(pointer).map(|handle| vec![handle]),
            "peer" => {
                let device = i32::try_from(number(1)).unwrap_or(0);
                self.cuda()?.peer(device, number(2) != 0).map(|()| vec![])
            }
            "allocon" => {
                let device = i32::try_from(number(3)).unwrap_or(0);
                let pointer = self.cuda()?.alloc_on(device, number(2))?;
                self.memory.insert(name.into(), (pointer, number(2)));
                Ok(vec![pointer])
            }
            "checkpoint" => self.cuda()?.checkpoint(name, number(2)).map(|()| vec![]),
            // The other holder's view of it: by the descriptor, past the driver.
            "dmaread" => {
                use std::os::unix::fs::FileExt;
                let mut data = vec![0; usize::try_from(bytes).unwrap_or(0)];
                let file = self.buffers.get(name).ok_or(CudaError(1))?;
                file.read_exact_at(&mut data, 0).map_err(|_| CudaError(304))?;
                let seed = u32::try_from(number(2)).unwrap_or(0);
                let wrong = data.iter().zip(pattern(bytes, seed)).filter(|(a, b)| **a != *b);
                Ok(vec![wrong.count() as u64])
            }
            _ => Err(CudaError(1)),
        }
    }
}

/// Bytes that depend on position and seed.
fn pattern(bytes: u64, seed: u32) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(0x9e37_79b9).wrapping_add(u64::from(seed)) >> 7) as u8)
        .collect()
}

/// Forks; the child calls the driver (which must refuse it, as after any fork) and ends. The child's driver code.
fn fork_and_use(cuda: Option<&Cuda>) -> u64 {
    // SAFETY: the child calls only the driver and `_exit`; this program has no other thread that holds a lock it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = match cuda.map(Cuda::info) {
            Some(Err(CudaError(code))) => i32::try_from(code & 0x7f).unwrap_or(127),
            Some(Ok(_)) => 0,
            None => match Cuda::open(0).and_then(|cuda| cuda.info()) {
                Ok(_) => 0,
                Err(CudaError(code)) => i32::try_from(code & 0x7f).unwrap_or(127),
            },
        };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made; `status` is a live integer.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    if waited == pid && libc::WIFEXITED(status) {
        u64::try_from(libc::WEXITSTATUS(status)).unwrap_or(255)
    } else {
        255
    }
}
