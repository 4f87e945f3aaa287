//! A serving cluster whose containers come and go with their requests: how many cards it needs.
//!
//! What is given is a recording: bytes and duty cycle of each container, one sample in about a minute. A container is *busy* in a
//! sample whose duty cycle is not zero. Statically, each has its peak for as long as it lives. Here its bytes leave the card
//! when it is idle and others need the room, or when the card is given back, and return when it wakes.
//!
//! * The cards' memory is granted by the arbiter of each node, the daemon's own; bytes move over each card's link at the measured
//!   speeds, from another node's memory at that of the net.
//! * Which card a container goes to is decided when it wakes, by what is known then: the bytes that it left with, and its usual
//!   duty cycle. When the sample shows more, a container moves, and waits for it.
//! * No card carries more than its bytes, nor more than its GPU time, of what is busy on it.
//! * A wake happens at a random moment of its sample, by a seed.
//! * Every wake's wait counts, also those of nothing, and every move's.

use std::time::Duration;

use ebb_policy::{PolicyConfig, TaskSpec, Time};
use ebb_units::Bytes;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use crate::read::gentd::Recording;
use crate::sim::{Fleet, Notice, Shape, Speeds, Who, in_seconds, seconds};

use crate::place::{Load, Move, Placer};

/// Sizes in which cards are sold.
const CARDS: [u64; 8] = [16, 24, 32, 40, 48, 80, 96, 141];

/// How the cluster is built and run.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Bytes of a card; `None`: the smallest that is sold and holds the largest container.
    pub card: Option<Bytes>,
    /// Cards of a node.
    pub per_node: usize,
    /// Memory of the cards that the operator has, over static allocation: within it a card is turned on when one is needed;
    /// beyond it only if moving containers does not help.
    pub pool_share: f64,
    /// How fast bytes move.
    pub speeds: Speeds,
    /// An idle container's bytes leave after so long even if nobody needs the room.
    pub idle_release: Duration,
    /// Of the moments at which containers wake.
    pub seed: u64,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            card: None,
            per_node: 8,
            pool_share: 0.575,
            speeds: Speeds::default(),
            idle_release: Duration::from_secs(10),
            seed: 1,
        }
    }
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Bytes of a card.
    pub card: Bytes,
    /// Static allocation at each container's peak: bytes at the busiest moment, and gibibyte-hours.
    pub static_peak: Bytes,
    /// See `static_peak`.
    pub static_gib_hours: f64,
    /// Cards on at the busiest moment.
    pub cards_peak: usize,
    /// Card-hours.
    pub card_hours: f64,
    /// Bytes of busy containers at the busiest moment: what someone who knows the future and moves for nothing would need.
    pub busy_peak: Bytes,
    /// Bytes of busy containers, gibibyte-hours.
    pub busy_gib_hours: f64,
    /// Waits of wakes and moves, seconds, the shortest first.
    pub waits: Vec<f64>,
    /// What each container waited in all, seconds.
    pub waited: Vec<f64>,
    /// Wakes that found their bytes on the card.
    pub warm: u64,
    /// Wakes.
    pub wakes: u64,
    /// Moves of busy containers to other cards.
    pub moves: u64,
    /// Samples in which a card was asked for more than its GPU time, after moves.
    pub over_gpu_time: u64,
    /// Samples in which busy containers had more bytes than their card, after moves.
    pub over_bytes: u64,
    /// Bytes that moved: out, back.
    pub moved: [Bytes; 2],
    /// Cards on at each sample.
    pub cards: Vec<usize>,
    /// Bytes of busy containers at each sample, and bytes at static allocation.
    pub busy: Vec<Bytes>,
    /// See `busy`.
    pub fixed: Vec<Bytes>,
    /// Events that the arbiters handled.
    pub events: u64,
}

impl Outcome {
    /// Memory of the cards needed at the peak, over static allocation.
    #[must_use]
    pub fn peak_vs_static(&self) -> f64 {
        ratio(
            self.card.0 as f64 * self.cards_peak as f64,
            self.static_peak.0 as f64,
        )
    }

    /// Card-hours, in bytes, over static allocation.
    #[must_use]
    pub fn card_hours_vs_static(&self) -> f64 {
        ratio(self.card_hours * gib(self.card), self.static_gib_hours)
    }

    /// The oracle's peak over static allocation.
    #[must_use]
    pub fn oracle_peak_vs_static(&self) -> f64 {
        ratio(self.busy_peak.0 as f64, self.static_peak.0 as f64)
    }

    /// A share of the waits is no longer than this, seconds.
    #[must_use]
    pub fn wait(&self, share: f64) -> f64 {
        crate::stats::quantile(&self.waits, share)
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

fn gib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / Bytes::gib(1).0 as f64
}

/// A recording that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// There is nothing in it.
    #[error("the recording has no samples")]
    Empty,
    /// A container is larger than any card.
    #[error("container {name} holds {peak}, more than a card of {card}")]
    TooLarge {
        /// Which.
        name: String,
        /// Its peak.
        peak: Bytes,
        /// The card.
        card: Bytes,
    },
}

/// Serves a recording.
///
/// # Errors
/// [`ServingError`] if a container does not fit a card, or there is none.
pub fn serve(recording: &Recording, setting: &Setting) -> Result<Outcome, ServingError> {
    let card = card_for(recording, setting.card)?;
    Ok(Run::new(recording, setting, card).run())
}

/// Bytes of a card that holds each container: those asked for, or the smallest that is sold.
///
/// # Errors
/// [`ServingError`] if a container does not fit a card, or there is none.
pub fn card_for(recording: &Recording, wanted: Option<Bytes>) -> Result<Bytes, ServingError> {
    let largest = recording
        .containers
        .iter()
        .max_by_key(|c| c.peak())
        .ok_or(ServingError::Empty)?;
    let peak = largest.peak();
    let fitting = CARDS.iter().map(|g| Bytes::gib(*g)).find(|card| *card >= peak);
    let card = wanted.or(fitting).unwrap_or(Bytes::gib(CARDS[CARDS.len() - 1]));
    if card < peak {
        return Err(ServingError::TooLarge {
            name: largest.name.clone(),
            peak,
            card,
        });
    }
    Ok(card)
}

/// A container while it is served.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    who: Option<Who>,
    busy: bool,
    /// It is to wait for its bytes since then.
    waits_since: Option<Time>,
    /// Its usual duty cycle while busy.
    usual: f64,
    /// What it wants in this sample.
    load: Load,
}

/// Moments within a sample.
const SAMPLE: u64 = u64::MAX;

struct Run<'a> {
    recording: &'a Recording,
    spec: TaskSpec,
    fleet: Fleet,
    placer: Placer,
    served: Vec<Served>,
    /// The container of each client.
    owner: Vec<usize>,
    rng: Pcg64,
    step: usize,
    /// Cards whose idle containers are being paused, to be given back.
    emptying: Vec<bool>,
    out: Outcome,
    counted: Time,
}

impl<'a> Run<'a> {
    fn new(recording: &'a Recording, setting: &Setting, card: Bytes) -> Self {
        let count = recording.containers.len();
        let pool = static_peak(recording).0 as f64 * setting.pool_share / card.0 as f64;
        let pool = (pool as usize).max(1);
        // One card each is enough, whatever happens.
        let shape = Shape {
            cards: count,
            per_node: setting.per_node,
            card,
            speeds: setting.speeds,
            policy: PolicyConfig {
                out_rate: setting.speeds.one_way as u64,
                in_rate: setting.speeds.one_way as u64,
                ..PolicyConfig::default()
            },
        };
        Self {
            recording,
            spec: TaskSpec {
                idle_release: Some(setting.idle_release),
                ..TaskSpec::default()
            },
            fleet: Fleet::new(shape),
            placer: Placer::new(count, card, count, pool),
            served: vec![
                Served {
                    usual: 0.25,
                    ..Served::default()
                };
                count
            ],
            owner: Vec::new(),
            rng: Pcg64::seed_from_u64(setting.seed),
            step: 0,
            emptying: vec![false; count],
            out: Outcome {
                card,
                waited: vec![0.0; count],
                ..Outcome::default()
            },
            counted: Time(0),
        }
    }

    fn run(mut self) -> Outcome {
        self.baselines();
        self.fleet.timer(Time(0), SAMPLE);
        while let Some(notice) = self.fleet.step() {
            match notice {
                Notice::Timer(SAMPLE) => {
                    if self.step == self.recording.steps {
                        break;
                    }
                    self.sample();
                }
                Notice::Timer(container) => self.wake(container as usize),
                Notice::Ready(who) => self.ready(who),
                Notice::Away(_) | Notice::Stopped(_) | Notice::Refused(_) => {}
            }
            self.give_back();
        }
        self.count();
        self.out.moved = self.fleet.moved();
        self.out.events = self.fleet.events();
        self.out.waits.sort_by(f64::total_cmp);
        self.out
    }

    /// What needs no simulation.
    fn baselines(&mut self) {
        let hours = self.recording.period / 3600.0;
        for step in 0..self.recording.steps {
            let containers = &self.recording.containers;
            let fixed = fixed_at(self.recording, step);
            let busy: Bytes = containers.iter().filter_map(|c| c.in_use(step)).sum();
            self.out.static_peak = self.out.static_peak.max(fixed);
            self.out.busy_peak = self.out.busy_peak.max(busy);
            self.out.static_gib_hours += gib(fixed) * hours;
            self.out.busy_gib_hours += gib(busy) * hours;
            self.out.fixed.push(fixed);
            self.out.busy.push(busy);
        }
    }

    /// The cards' time up to now.
    fn count(&mut self) {
        let hours = self.fleet.now().since(self.counted).as_secs_f64() / 3600.0;
        self.counted = self.fleet.now();
        let on = self.placer.cards_on();
        self.out.card_hours += on as f64 * hours;
        self.out.cards_peak = self.out.cards_peak.max(on);
    }

    /// A new sample: who is idle, who goes on with another load, who will wake when.
    fn sample(&mut self) {
        let step = self.step;
        self.step += 1;
        self.check();
        let recording = self.recording;
        self.fleet
            .timer(seconds(self.step as f64 * recording.period), SAMPLE);
        for (n, container) in recording.containers.iter().enumerate() {
            let in_use = container.in_use(step);
            if !container.life().contains(&step) {
                self.end(n);
                continue;
            }
            match in_use {
                None => self.sleep(n),
                Some(bytes) => {
                    let load = Load {
                        bytes,
                        duty: container.duty[step],
                    };
                    self.served[n].load = load;
                    if self.served[n].busy {
                        self.placer.change(n, load);
                        let s = self.served[n];
                        if let Some(who) = s.who {
                            self.fleet.want(who, bytes);
                        }
                    } else {
                        let within = (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
                        let at = (step as f64 + within * 0.95) * recording.period;
                        self.fleet.timer(seconds(at), n as u64);
                    }
                }
            }
        }
        self.relieve();
        self.count();
        self.out.cards.push(self.placer.cards_on());
    }

    /// At the end of a sample no card may be carrying too much.
    fn check(&mut self) {
        for card in 0..self.served.len() {
            let load = self.placer.load_of(card);
            self.out.over_gpu_time += u64::from(load.duty > 1.0 + 1e-6);
            self.out.over_bytes += u64::from(load.bytes > self.out.card);
        }
    }

    fn wake(&mut self, n: usize) {
        let load = self.served[n].load;
        let first = self.served[n].who.is_none();
        // What it comes back with is known; what it will do is not.
        let known = match self.served[n].who {
            Some(who) => {
                let (here, away) = self.fleet.bytes_of(who);
                here + away
            }
            None => load.bytes,
        };
        let expected = Load {
            bytes: known.min(self.out.card),
            duty: self.served[n].usual,
        };
        self.served[n].busy = true;
        self.served[n].waits_since = Some(self.fleet.now());
        self.out.wakes += 1;
        let moves = self.placer.wake(n, expected);
        if first {
            // It was loaded before the recording began: its bytes are in host memory.
            let card = self.placer.card_of(n).unwrap_or(0);
            let who = self.fleet.join(card, self.spec.clone(), known);
            self.own(who, n);
        }
        self.carry_out(&moves);
        if let Some(who) = self.served[n].who {
            if self.fleet.bytes_of(who).1.is_zero() {
                self.out.warm += 1;
            }
            self.fleet.resume(who);
            self.fleet.busy(who);
            // Now it shows.
            self.fleet.want(who, load.bytes);
        }
        let s = &mut self.served[n];
        s.usual += 0.2 * (load.duty - s.usual);
        self.placer.change(n, load);
        self.relieve();
        self.count();
    }

    fn own(&mut self, who: Who, n: usize) {
        if self.owner.len() <= who.0 {
            self.owner.resize(who.0 + 1, n);
        }
        self.owner[who.0] = n;
        self.served[n].who = Some(who);
    }

    /// Moves busy containers off cards that carry too much.
    fn relieve(&mut self) {
        for card in self.placer.overloaded() {
            let moves = self.placer.relieve(card);
            self.carry_out(&moves);
        }
    }

    fn carry_out(&mut self, moves: &[Move]) {
        for Move { container, card } in moves {
            self.emptying[*card] = false;
            let s = self.served[*container];
            let Some(who) = s.who else { continue };
            if self.fleet.card_of(who) == *card {
                continue;
            }
            let new = self.fleet.relocate(who, *card);
            self.own(new, *container);
            if s.busy && s.waits_since.is_none() {
                self.out.moves += 1;
                self.served[*container].waits_since = Some(self.fleet.now());
            }
        }
        self.count();
    }

    fn ready(&mut self, who: Who) {
        let n = self.owner[who.0];
        if self.served[n].who == Some(who)
            && let Some(since) = self.served[n].waits_since.take()
        {
            let wait = self.fleet.now().since(since).as_secs_f64();
            self.out.waits.push(wait);
            self.out.waited[n] += wait;
        }
    }

    fn sleep(&mut self, n: usize) {
        if !self.served[n].busy {
            return;
        }
        self.served[n].busy = false;
        if let Some(since) = self.served[n].waits_since.take() {
            // It gave up before its bytes were there.
            let wait = self.fleet.now().since(since).as_secs_f64();
            self.out.waits.push(wait);
            self.out.waited[n] += wait;
        }
        self.placer.idle(n);
        if let Some(who) = self.served[n].who {
            self.fleet.idle(who);
        }
    }

    fn end(&mut self, n: usize) {
        self.sleep(n);
        if let Some(who) = self.served[n].who.take() {
            self.fleet.leave(who);
        }
    }

    /// Cards on which nobody is busy are emptied, and given back when they are empty.
    fn give_back(&mut self) {
        for card in 0..self.served.len() {
            if !self.placer.is_on(card) || !self.placer.nobody_busy(card) {
                continue;
            }
            if !self.emptying[card] {
                self.emptying[card] = true;
                for n in 0..self.served.len() {
                    let s = self.served[n];
                    if let Some(who) = s.who.filter(|who| self.fleet.card_of(*who) == card) {
                        self.fleet.pause(who);
                    }
                }
            }
            if self.fleet.granted_on(card).is_zero() {
                self.count();
                self.placer.turn_off(card);
                self.emptying[card] = false;
            }
        }
    }
}

/// Static allocation at each container's peak, at the busiest moment.
fn static_peak(recording: &Recording) -> Bytes {
    (0..recording.steps)
        .map(|step| fixed_at(recording, step))
        .max()
        .unwrap_or_default()
}

fn fixed_at(recording: &Recording, step: usize) -> Bytes {
    recording
        .containers
        .iter()
        .filter(|c| c.life().contains(&step))
        .map(|c| c.peak())
        .sum()
}

/// Hours of a recording.
#[must_use]
pub fn hours(recording: &Recording) -> f64 {
    in_seconds(seconds(recording.period * recording.steps as f64)) / 3600.0
}

#[cfg(test)]
mod tests;
