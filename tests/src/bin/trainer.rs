//! A training program with a checkpoint of its own: `trainer FILE BYTES`.
//!
//! It holds so many bytes, makes sure on the GPU in each step that every word is that of the step before, and writes the next.
//! It goes on from FILE if that exists; saves itself there and ends when it gets `SIGUSR1`; saves itself there and goes on when
//! there is FILE.save, which it then removes; and is done when there is FILE.end. What it does is told a line each: `begins STEP`
//! or `goes on STEP`, `saved STEP`, `done STEP`.
//!
//! Exit status: 0 all right, 1 the driver or the file failed, 3 there was no memory, 4 a word was wrong.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_tests::{Cuda, CudaError};

static TOLD: AtomicBool = AtomicBool::new(false);

extern "C" fn told(_: libc::c_int) {
    TOLD.store(true, Ordering::Relaxed);
}

fn say(what: &str, step: u32) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{what} {step}").and_then(|()| out.flush());
}

/// Why it ends before it is done.
enum Trouble {
    Driver(CudaError),
    File(std::io::Error),
    NoMemory,
    Wrong,
}

impl From<CudaError> for Trouble {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Self {
        Self::File(error)
    }
}

/// A name beside the checkpoint's.
fn beside(file: &Path, what: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(what);
    name.into()
}

fn save(cuda: &Cuda, file: &Path, memory: u64, bytes: usize, step: u32) -> Result<(), Trouble> {
    let mut saved = vec![0; bytes + 4];
    saved[..4].copy_from_slice(&step.to_le_bytes());
    cuda.synchronize()?;
    cuda.read(memory, &mut saved[4..])?;
    let new = beside(file, ".new");
    std::fs::write(&new, saved)?;
    std::fs::rename(new, file)?;
    say("saved", step);
    Ok(())
}

fn train(file: &Path, bytes: usize) -> Result<(), Trouble> {
    let cuda = Cuda::open(0)?;
    let memory = cuda.alloc(bytes as u64).map_err(|_| Trouble::NoMemory)?;
    let mut step = 0u32;
    if file.exists() {
        let saved = std::fs::read(file)?;
        let (head, words) = saved.split_at_checked(4).ok_or(Trouble::Wrong)?;
        step = u32::from_le_bytes(head.try_into().unwrap_or_default());
        cuda.write(memory, words)?;
        say("goes on", step);
    } else {
        cuda.launch_fill(memory, bytes as u64, 7, step)?;
        say("begins", step);
    }
    loop {
        if cuda.count_wrong(memory, bytes as u64, 7, step)? != 0 {
            return Err(Trouble::Wrong);
        }
        if beside(file, ".end").exists() {
            say("done", step);
            return Ok(());
        }
        if TOLD.load(Ordering::Relaxed) {
            return save(&cuda, file, memory, bytes, step);
        }
        if beside(file, ".save").exists() {
            save(&cuda, file, memory, bytes, step)?;
            std::fs::remove_file(beside(file, ".save"))?;
        }
        step += 1;
        cuda.launch_fill(memory, bytes as u64, 7, step)?;
        cuda.launch_spin(5)?;
    }
}

fn main() -> ExitCode {
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::signal(libc::SIGUSR1, told as *const () as libc::sighandler_t) };
    let mut args = std::env::args().skip(1);
    let (Some(file), Some(Ok(bytes))) = (args.next(), args.next().map(|n| n.parse())) else {
        eprintln!("usage: trainer FILE BYTES");
        return ExitCode::from(2);
    };
    match train(Path::new(&file), bytes) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Trouble::NoMemory) => ExitCode::from(3),
        Err(Trouble::Wrong) => ExitCode::from(4),
        Err(Trouble::Driver(error)) => {
            eprintln!("{error:?}");
            ExitCode::FAILURE
        }
        Err(Trouble::File(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
