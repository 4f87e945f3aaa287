//! [`Timeline`]: what a policy held over time, in a bounded number of points however long the trace is.

use super::policy::Figures;

/// More points than this are merged by pairs.
const POINTS: usize = 4096;

/// Some events that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// When the first of them was.
    pub at_ns: u64,
    /// Most live bytes after any of them.
    pub live: u64,
    /// Most physical bytes after any of them.
    pub physical: u64,
    /// Map calls before the first of them.
    pub map_calls_before: u64,
}

/// What a policy held over time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    points: Vec<Point>,
    /// Events of a point.
    stride: u64,
    events: u64,
    /// Of the last event.
    map_calls: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            points: Vec::new(),
            stride: 1,
            events: 0,
            map_calls: 0,
        }
    }
}

impl Timeline {
    /// Adds what stands after one more event.
    pub fn add(&mut self, at_ns: u64, figures: Figures) {
        if self.events.is_multiple_of(self.stride) {
            if self.points.len() == POINTS {
                self.halve();
            }
            // After merging, an event may belong to the last point.
            if self.events.is_multiple_of(self.stride) {
                self.points.push(Point {
                    at_ns,
                    live: 0,
                    physical: 0,
                    map_calls_before: self.map_calls,
                });
            }
        }
        if let Some(last) = self.points.last_mut() {
            last.live = last.live.max(figures.live);
            last.physical = last.physical.max(figures.physical);
        }
        self.events += 1;
        self.map_calls = figures.map_calls;
    }

    fn halve(&mut self) {
        let merged = self.points.chunks(2).map(|pair| {
            pair.iter().copied().reduce(|a, b| Point {
                live: a.live.max(b.live),
                physical: a.physical.max(b.physical),
                ..a
            })
        });
        self.points = merged.flatten().collect();
        self.stride *= 2;
    }

    /// In order of time.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Events that a point stands for; the last may stand for fewer.
    #[must_use]
    pub fn stride(&self) -> u64 {
        self.stride
    }

    /// Map calls before the second half of the events; exact to [`Timeline::stride`] events.
    #[must_use]
    pub fn map_calls_at_half(&self) -> u64 {
        let half = usize::try_from(self.events.div_ceil(2).div_ceil(self.stride)).unwrap_or(usize::MAX);
        self.points
            .get(half)
            .map_or(self.map_calls, |point| point.map_calls_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_traces_keep_their_peaks_in_few_points() {
        let mut line = Timeline::default();
        let n = 10 * POINTS as u64 + 3;
        for i in 0..n {
            line.add(
                i,
                Figures {
                    live: if i == 12_345 { 9 } else { 1 },
                    physical: if i == n - 1 { 20 } else { 10 },
                    map_calls: i / 2,
                },
            );
        }
        assert!(line.points().len() <= POINTS && line.points().len() > POINTS / 4);
        assert_eq!(line.points().len() as u64, n.div_ceil(line.stride()));
        assert_eq!(line.points().iter().map(|p| p.live).max(), Some(9));
        assert_eq!(line.points().iter().map(|p| p.physical).max(), Some(20));
        let half = line.map_calls_at_half();
        assert!(half.abs_diff(n / 4) <= line.stride(), "{half}");
    }

    #[test]
    fn short_traces_are_halved_exactly() {
        let mut line = Timeline::default();
        for map_calls in [1, 2, 2, 3] {
            line.add(
                0,
                Figures {
                    map_calls,
                    ..Figures::default()
                },
            );
        }
        assert_eq!(line.map_calls_at_half(), 2);
        assert_eq!(Timeline::default().map_calls_at_half(), 0);
    }
}
