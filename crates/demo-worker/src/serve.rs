//! Measuring on command: what `ebb bench` asks of a program that knows nothing of ebb.
//!
//! A line in, a JSON line out. Sizes are bytes, times seconds.
//!
//! | line | answer |
//! | --- | --- |
//! | `hold BYTES` | `{"held":n}`; takes the memory in blocks of 1 GiB at most and fills it |
//! | `touch` | `{"seconds":s}`: a launch of nothing, and waiting for it |
//! | `rewrite` | `{"seconds":s}`: every word is written anew |
//! | `check` | `{"wrong":n,"seconds":s}` |
//! | `link BYTES ROUNDS` | `{"out":[s],"in":[s],"both":[s]}`: pinned copies of so many bytes, each way and both at once |
//! | `card BYTES ROUNDS` | `{"each":[s]}`: copies of so many bytes from one place on the card to another |
//! | `peer BYTES ROUNDS` | `{"cards":n,"out":[s],"in":[s]}`: copies of so many bytes to a second card and back; empty if there is none in reach |
//! | `take BYTES` | `{"seconds":s}`: allocates it in one piece, and keeps it |
//! | `launch BATCHES` | `{"each":[s]}`: mean time of a launch in batches of 500 |
//! | `alloc BYTES N` | `{"each":[s]}`: allocating and freeing |
//!
//! A line that cannot be obeyed is answered by `{"error":"..."}`, out-of-memory by `{"error":"...","out_of_memory":true}`.

use std::io::{BufRead, Write};
use std::time::Instant;

use serde_json::{Value, json};

use crate::driver::{Block, Driver, DriverError};
use crate::seed_of;

/// The largest block that `hold` takes.
const BLOCK: u64 = 1 << 30;
/// Launches of a batch: few enough for the driver's queue, which makes a launch wait when it is full.
const BATCH: u32 = 500;
/// Rounds that are not counted: the first calls of a kind are slower.
const WARM_UP: u64 = 1;

/// Obeys until the input ends.
pub(crate) fn serve(input: impl BufRead, mut output: impl Write) -> Result<(), DriverError> {
    let driver = Driver::open()?;
    let mut server = Server {
        result: driver.alloc(8)?,
        driver: &driver,
        blocks: Vec::new(),
        taken: Vec::new(),
        step: 0,
    };
    for line in input.lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match server.obey(&words) {
            Ok(answer) => answer,
            Err(Refused::Line) => json!({ "error": format!("`{line}` is no command") }),
            Err(Refused::Driver(error)) => {
                json!({ "error": error.to_string(), "out_of_memory": error.is_out_of_memory() })
            }
        };
        // Nobody listening is the end.
        if writeln!(output, "{answer}")
            .and_then(|()| output.flush())
            .is_err()
        {
            break;
        }
    }
    Ok(())
}

enum Refused {
    Line,
    Driver(DriverError),
}

impl From<DriverError> for Refused {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<std::num::ParseIntError> for Refused {
    fn from(_: std::num::ParseIntError) -> Self {
        Self::Line
    }
}

struct Server<'a> {
    driver: &'a Driver,
    result: Block,
    blocks: Vec<Block>,
    /// Memory without a pattern.
    taken: Vec<Block>,
    /// Of the pattern that the blocks hold.
    step: u32,
}

impl Server<'_> {
    fn obey(&mut self, words: &[&str]) -> Result<Value, Refused> {
        match *words {
            ["hold", bytes] => self.hold(bytes.parse()?),
            ["touch"] => Self::timed(|| {
                self.driver.launch_nothing()?;
                self.driver.synchronize()
            }),
            ["rewrite"] => self.rewrite(),
            ["check"] => self.check(),
            ["link", bytes, rounds] => self.link(bytes.parse()?, rounds.parse()?),
            ["card", bytes, rounds] => self.card(bytes.parse()?, rounds.parse()?),
            ["peer", bytes, rounds] => self.peer(bytes.parse()?, rounds.parse()?),
            ["take", bytes] => self.take(bytes.parse()?),
            ["launch", batches] => self.launch(batches.parse()?),
            ["alloc", bytes, times] => self.alloc(bytes.parse()?, times.parse()?),
            _ => Err(Refused::Line),
        }
    }

    fn timed(run: impl FnOnce() -> Result<(), DriverError>) -> Result<Value, Refused> {
        let began = Instant::now();
        run()?;
        Ok(json!({ "seconds": began.elapsed().as_secs_f64() }))
    }

    fn hold(&mut self, bytes: u64) -> Result<Value, Refused> {
        let mut left = bytes / 4 * 4;
        while left > 0 {
            let block = self.driver.alloc(left.min(BLOCK))?;
            left -= block.bytes;
            self.blocks.push(block);
        }
        self.fill()?;
        self.driver.synchronize()?;
        Ok(json!({ "held": self.blocks.iter().map(|block| block.bytes).sum::<u64>() }))
    }

    fn fill(&self) -> Result<(), DriverError> {
        for (i, block) in self.blocks.iter().enumerate() {
            self.driver.queue_fill(*block, seed_of(1, i), self.step)?;
        }
        Ok(())
    }

    fn rewrite(&mut self) -> Result<Value, Refused> {
        self.step += 1;
        Self::timed(|| {
            self.fill()?;
            self.driver.synchronize()
        })
    }

    fn check(&self) -> Result<Value, Refused> {
        let began = Instant::now();
        self.driver.set(self.result, 0)?;
        for (i, block) in self.blocks.iter().enumerate() {
            self.driver
                .queue_check(*block, seed_of(1, i), self.step, self.result)?;
        }
        let wrong = self.driver.read_u64(self.result)?;
        Ok(json!({ "wrong": wrong, "seconds": began.elapsed().as_secs_f64() }))
    }

    fn link(&self, bytes: u64, rounds: u64) -> Result<Value, Refused> {
        let driver = self.driver;
        let (a, b) = (driver.alloc(bytes)?, driver.alloc(bytes)?);
        let (stream, other) = (driver.stream()?, driver.stream()?);
        let (to, from) = (driver.pinned(bytes)?, driver.pinned(bytes)?);
        let (mut out, mut back, mut both) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds + WARM_UP {
            let began = Instant::now();
            driver.queue_out(&to, a, stream)?;
            driver.wait(stream)?;
            let copied_out = began.elapsed();
            driver.queue_in(b, &from, stream)?;
            driver.wait(stream)?;
            let copied_in = began.elapsed() - copied_out;
            let began = Instant::now();
            driver.queue_out(&to, a, stream)?;
            driver.queue_in(b, &from, other)?;
            driver.wait(stream)?;
            driver.wait(other)?;
            if round >= WARM_UP {
                both.push(began.elapsed().as_secs_f64());
                out.push(copied_out.as_secs_f64());
                back.push(copied_in.as_secs_f64());
            }
        }
        drop((to, from));
        driver.free(a)?;
        driver.free(b)?;
        Ok(json!({ "out": out, "in": back, "both": both }))
    }

    fn card(&self, bytes: u64, rounds: u64) -> Result<Value, Refused> {
        let driver = self.driver;
        let (a, b) = (driver.alloc(bytes)?, driver.alloc(bytes)?);
        let stream = driver.stream()?;
        let mut each = Vec::new();
        for round in 0..rounds + WARM_UP {
            let began = Instant::now();
            driver.queue_within(b, a, stream)?;
            driver.wait(stream)?;
            if round >= WARM_UP {
                each.push(began.elapsed().as_secs_f64());
            }
        }
        driver.free(a)?;
        driver.free(b)?;
        Ok(json!({ "each": each }))
    }

    fn peer(&self, bytes: u64, rounds: u64) -> Result<Value, Refused> {
        let driver = self.driver;
        let cards = driver.cards()?;
        let (mut out, mut back) = (Vec::new(), Vec::new());
        if let Some(other) = driver.second(bytes)? {
            let (here, stream) = (driver.alloc(bytes)?, driver.stream()?);
            for round in 0..rounds + WARM_UP {
                let began = Instant::now();
                driver.queue_to_second(&other, here, stream)?;
                driver.wait(stream)?;
                let copied_out = began.elapsed();
                driver.queue_from_second(here, &other, stream)?;
                driver.wait(stream)?;
                if round >= WARM_UP {
                    out.push(copied_out.as_secs_f64());
                    back.push((began.elapsed() - copied_out).as_secs_f64());
                }
            }
            driver.free(here)?;
            driver.leave_second(other)?;
        }
        Ok(json!({ "cards": cards, "out": out, "in": back }))
    }

    fn take(&mut self, bytes: u64) -> Result<Value, Refused> {
        let began = Instant::now();
        self.taken.push(self.driver.alloc(bytes / 4 * 4)?);
        Ok(json!({ "seconds": began.elapsed().as_secs_f64() }))
    }

    fn launch(&self, batches: u64) -> Result<Value, Refused> {
        let mut each = Vec::new();
        for batch in 0..batches + WARM_UP {
            let began = Instant::now();
            for _ in 0..BATCH {
                self.driver.launch_nothing()?;
            }
            let mean = began.elapsed().as_secs_f64() / f64::from(BATCH);
            self.driver.synchronize()?;
            if batch >= WARM_UP {
                each.push(mean);
            }
        }
        Ok(json!({ "each": each }))
    }

    fn alloc(&self, bytes: u64, times: u64) -> Result<Value, Refused> {
        let mut each = Vec::new();
        for time in 0..times + 10 * WARM_UP {
            let began = Instant::now();
            let block = self.driver.alloc(bytes)?;
            self.driver.free(block)?;
            if time >= 10 * WARM_UP {
                each.push(began.elapsed().as_secs_f64());
            }
        }
        Ok(json!({ "each": each }))
    }
}
