//! A program that uses the GPU as it is told on standard input, one command a line, one answer a line.
//!
//! ```text
//! open [DEVICE]        alloc NAME BYTES    free NAME          fill NAME SEED       check NAME SEED
//! info                 total               range NAME         spin MS              sync
//! write NAME SEED      read NAME SEED      query              asyncalloc NAME N    asyncfree NAME
//! graph NAME SEED      launch NAME SEED    rawfree ADDRESS    fork                 closefds
//! mapalloc NAME BYTES  mapfree NAME
//! ```
//! Answers are `ok [numbers]` or `err CODE`. The first command that needs the driver opens device 0.

use std::collections::HashMap;
use std::io::{BufRead, Write};

use ebb_tests::{Cuda, CudaError};

struct Script {
    cuda: Option<Cuda>,
    memory: HashMap<String, (u64, u64)>,
}

/// Bytes of a handle that the program maps by itself.
const UNIT: u64 = 2 << 20;

fn main() {
    let mut script = Script {
        cuda: None,
        memory: HashMap::new(),
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
