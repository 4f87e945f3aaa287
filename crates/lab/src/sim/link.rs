//! A card's link to its host: a lane each way, one chunk at a time.

use std::collections::VecDeque;
use std::time::Duration;

use ebb_units::Bytes;

use super::{Due, Fleet, takes};

/// How fast bytes move, bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Either way alone.
    pub one_way: f64,
    /// Both ways at once, together.
    pub both_ways: f64,
    /// From the host memory of another node.
    pub net: f64,
}

impl Default for Speeds {
    /// As measured on an H200 over PCIe Gen5 x16; the net is a 400 Gb/s port less its framing.
    fn default() -> Self {
        Self {
            one_way: 55e9,
            both_ways: 94e9,
            net: 48e9,
        }
    }
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Direction {
    /// To the host.
    Out,
    /// To the card.
    Back,
}

/// One way of a link.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// The chunk on its way: whose, how much, for how long.
    current: Option<(usize, Bytes, Duration)>,
    waiting: VecDeque<(usize, Bytes)>,
}

impl Fleet {
    /// Sends a chunk of a client over its card's link when it is its turn.
    pub(super) fn send(&mut self, who: usize, direction: Direction, bytes: Bytes) {
        let card = self.clients[who].card;
        self.lanes[card][direction as usize]
            .waiting
            .push_back((who, bytes));
        self.next_chunk(card, direction);
    }

    fn next_chunk(&mut self, card: usize, direction: Direction) {
        let other = &self.lanes[card][1 - direction as usize];
        let speeds = self.shape.speeds;
        let rate = if other.current.is_some() {
            speeds.both_ways / 2.0
        } else {
            speeds.one_way
        };
        let lane = &mut self.lanes[card][direction as usize];
        if lane.current.is_some() {
            return;
        }
        let Some((who, bytes)) = lane.waiting.pop_front() else {
            return;
        };
        let rate = if direction == Direction::Back && self.clients[who].over_net {
            rate.min(speeds.net)
        } else {
            rate
        };
        let time = takes(bytes, rate);
        lane.current = Some((who, bytes, time));
        let at = self.now.after(time);
        self.push(at, Due::Chunk(card, direction));
    }

    pub(super) fn chunk_done(&mut self, card: usize, direction: Direction) {
        let Some((who, bytes, time)) = self.lanes[card][direction as usize].current.take() else {
            return;
        };
        self.moved[direction as usize] += bytes;
        if !self.clients[who].gone {
            match direction {
                Direction::Out => self.copied_out(who, bytes, time),
                Direction::Back => self.copied_in(who, bytes, time),
            }
        }
        self.next_chunk(card, direction);
    }
}
