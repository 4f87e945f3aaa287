//! A GPU program that knows nothing of ebb: it speaks to the driver, holds memory, and makes sure that nobody changes it.
//!
//! It takes `--bytes` in blocks of different sizes and fills them with a pattern that depends on position, seed and
//! step. Each step checks on the GPU that every word has the pattern of the step before, then writes the next. What it
//! does is told as JSON lines: `{"event":"holding",...}`, `{"event":"step",...}` for each step, `{"event":"done",...}`.
//! With `--probe` it only says what the device is: `{"event":"device",...}`. With `--serve` it obeys lines on its
//! standard input and measures ([`serve`]).
//!
//! Exit status: 0 all right, 1 the driver failed, 2 bad arguments, 3 the card had no room, 4 a word was wrong.

mod driver;
mod serve;

use std::fs::OpenOptions;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use driver::{Block, Driver, DriverError};
use serde_json::json;

const USAGE: &str = "usage: ebb-demo-worker --bytes N --steps S --seed X [--progress-fd FD]\n       ebb-demo-worker --probe\n       ebb-demo-worker --serve";
const FAILED: u8 = 1;
const BAD_ARGUMENTS: u8 = 2;
const OUT_OF_MEMORY: u8 = 3;
const MISMATCH: u8 = 4;

struct Arguments {
    bytes: u64,
    steps: u32,
    seed: u32,
    progress_fd: Option<u32>,
}

fn main() -> ExitCode {
    if std::env::args().skip(1).eq(["--probe"]) {
        return match probe() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error),
        };
    }
    if std::env::args().skip(1).eq(["--serve"]) {
        return match serve::serve(std::io::stdin().lock(), std::io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error),
        };
    }
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("error: {message}\n{USAGE}");
            return ExitCode::from(BAD_ARGUMENTS);
        }
    };
    let mut progress: Box<dyn Write> = match arguments.progress_fd {
        None => Box::new(std::io::stdout()),
        // Opening the descriptor anew leaves the inherited one to whoever gave it to us.
        Some(fd) => match OpenOptions::new()
            .append(true)
            .open(format!("/proc/self/fd/{fd}"))
        {
            Ok(file) => Box::new(file),
            Err(error) => {
                eprintln!("error: --progress-fd {fd}: {error}\n{USAGE}");
                return ExitCode::from(BAD_ARGUMENTS);
            }
        },
    };
    match work(&arguments, &mut progress) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("error: {wrong} words were not as written");
            ExitCode::from(MISMATCH)
        }
        Err(error) => fail(&error),
    }
}

fn fail(error: &DriverError) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::from(if error.is_out_of_memory() {
        OUT_OF_MEMORY
    } else {
        FAILED
    })
}

fn probe() -> Result<(), DriverError> {
    let (name, uuid, total, free) = Driver::open()?.describe()?;
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    );
    println!(
        "{}",
        json!({ "event": "device", "name": name, "uuid": uuid, "total": total, "free": free })
    );
    Ok(())
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let (mut bytes, mut steps, mut seed, mut progress_fd) = (None, None, None, None);
    while let Some(name) = words.next() {
        let number: Result<u64, String> = words
            .next()
            .ok_or_else(|| format!("{name} wants a number"))
            .and_then(|text| text.parse().map_err(|_| format!("{name}: `{text}` is no number")));
        let small = |n: u64| u32::try_from(n).map_err(|_| format!("{name}: {n} is too large"));
        match name.as_str() {
            "--bytes" => bytes = Some(number?),
            "--steps" => steps = Some(small(number?)?),
            "--seed" => seed = Some(small(number?)?),
            "--progress-fd" => progress_fd = Some(small(number?)?),
            _ => return Err(format!("{name} is no argument of this program")),
        }
    }
    let bytes = bytes.ok_or("--bytes is missing")?;
    if bytes < 4096 || bytes % 4 != 0 {
        return Err(format!(
            "--bytes: {bytes} is not a multiple of 4 of at least 4096"
        ));
    }
    Ok(Arguments {
        bytes,
        steps: steps.ok_or("--steps is missing")?,
        seed: seed.ok_or("--seed is missing")?,
        progress_fd,
    })
}

/// Sizes as programs have them: a few large, some odd, many small. Their sum is `total`.
fn sizes(total: u64) -> Vec<u64> {
    let mut left = total;
    let mut sizes = Vec::new();
    for small in [512, 4096, 100 << 10, 1 << 20, (3 << 20) + 4] {
        // Small blocks are a spice: they never become the meal.
        if small * 16 <= left {
            sizes.push(small);
            left -= small;
        }
    }
    while left > 64 << 20 && sizes.len() < 16 {
        let half = left / 2 / 4 * 4;
        sizes.push(half);
        left -= half;
    }
    sizes.push(left);
    sizes
}

/// Each block has a pattern of its own, so that two that were exchanged would be found.
fn seed_of(seed: u32, block: usize) -> u32 {
    seed.wrapping_add((block as u32).wrapping_mul(0x9e37_79b9))
}

/// Holds, checks and rewrites the memory. Returns how many words were wrong.
fn work(arguments: &Arguments, progress: &mut dyn Write) -> Result<u64, DriverError> {
    let driver = Driver::open()?;
    let began = Instant::now();
    let mut tell = |value: serde_json::Value| {
        // Nobody listening is no reason to stop working.
        let _ = writeln!(progress, "{value}").and_then(|()| progress.flush());
    };
    let result = driver.alloc(8)?;
    let blocks = sizes(arguments.bytes)
        .into_iter()
        .map(|bytes| driver.alloc(bytes))
        .collect::<Result<Vec<Block>, _>>()?;
    for (i, block) in blocks.iter().enumerate() {
        driver.queue_fill(*block, seed_of(arguments.seed, i), 0)?;
    }
    driver.synchronize()?;
    tell(json!({
        "event": "holding", "bytes": arguments.bytes, "blocks": blocks.len(), "seconds": began.elapsed().as_secs_f64(),
    }));
    let mut wrong = 0;
    for step in 1..=arguments.steps {
        let step_began = Instant::now();
        driver.set(result, 0)?;
        for (i, block) in blocks.iter().enumerate() {
            let seed = seed_of(arguments.seed, i);
            driver.queue_check(*block, seed, step - 1, result)?;
            driver.queue_fill(*block, seed, step)?;
        }
        let found = driver.read_u64(result)?;
        driver.synchronize()?;
        wrong += found;
        tell(json!({
            "event": "step", "step": step, "steps": arguments.steps, "mismatches": found,
            "seconds": step_began.elapsed().as_secs_f64(),
        }));
    }
    driver.set(result, 0)?;
    for (i, block) in blocks.iter().enumerate() {
        driver.queue_check(*block, seed_of(arguments.seed, i), arguments.steps, result)?;
    }
    wrong += driver.read_u64(result)?;
    for block in blocks {
        driver.free(block)?;
    }
    driver.free(result)?;
    tell(json!({
        "event": "done", "steps": arguments.steps, "mismatches": wrong, "seconds": began.elapsed().as_secs_f64(),
    }));
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_are_as_large_as_asked_for_and_of_different_sizes() {
        for total in [
            4096,
            8192,
            1 << 20,
            100 << 20,
            384 << 20,
            100 << 30,
            (7 << 30) + 4,
        ] {
            let sizes = sizes(total);
            assert_eq!(sizes.iter().sum::<u64>(), total);
            assert!(sizes.iter().all(|size| *size > 0 && size % 4 == 0), "{sizes:?}");
        }
        assert!(sizes(384 << 20).len() >= 6);
    }

    #[test]
    fn arguments_are_checked() {
        let parsed = |text: &str| parse(text.split_whitespace().map(String::from));
        assert!(parsed("--bytes 8192 --steps 3 --seed 1").is_ok());
        for bad in [
            "",
            "--bytes",
            "--bytes x --steps 1 --seed 1",
            "--bytes 10 --steps 1 --seed 1",
            "--what 1",
            "--bytes 8192 --steps 99999999999 --seed 1",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
