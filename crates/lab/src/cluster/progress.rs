//! [`Progress`]: who runs on which card, how fast, and when each will be through with its phase.

use super::share;

/// Something that runs.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    card: usize,
    duty: f64,
    /// Seconds of its phase that are left, as alone.
    left: f64,
    speed: f64,
    since: f64,
    runs: bool,
    /// Counts the times that it will be through: only the last one holds.
    version: u32,
}

/// When a job will be through; holds only while its version is the last one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Due {
    pub(super) at: f64,
    pub(super) job: usize,
    pub(super) version: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Progress {
    jobs: Vec<Run>,
    cards: Vec<Vec<usize>>,
}

impl Progress {
    pub(super) fn new(jobs: usize, cards: usize) -> Self {
        Self {
            jobs: vec![Run::default(); jobs],
            cards: vec![Vec::new(); cards],
        }
    }

    /// A job runs from now on, with so many seconds before it.
    pub(super) fn start(&mut self, now: f64, job: usize, card: usize, duty: f64, seconds: f64) -> Vec<Due> {
        let mut due = self.stop(now, job).1;
        let run = &mut self.jobs[job];
        *run = Run {
            card,
            duty,
            left: seconds,
            speed: 0.0,
            since: now,
            runs: true,
            version: run.version,
        };
        self.cards[card].push(job);
        due.extend(self.retime(now, card));
        due
    }

    /// A job does not run from now on: what is left of its phase, and when the others will be through.
    pub(super) fn stop(&mut self, now: f64, job: usize) -> (f64, Vec<Due>) {
        if !self.jobs[job].runs {
            return (self.jobs[job].left, Vec::new());
        }
        let card = self.jobs[job].card;
        self.advance(now, job);
        let run = &mut self.jobs[job];
        run.runs = false;
        run.version += 1;
        let left = run.left;
        self.cards[card].retain(|j| *j != job);
        (left, self.retime(now, card))
    }

    /// Whether this is still when the job is through; if it is, it has stopped.
    pub(super) fn through(&mut self, now: f64, job: usize, version: u32) -> Option<Vec<Due>> {
        let run = &self.jobs[job];
        if !run.runs || run.version != version {
            return None;
        }
        Some(self.stop(now, job).1)
    }

    fn advance(&mut self, now: f64, job: usize) {
        let run = &mut self.jobs[job];
        run.left = (run.left - (now - run.since) * run.speed).max(0.0);
        run.since = now;
    }

    fn retime(&mut self, now: f64, card: usize) -> Vec<Due> {
        let members = std::mem::take(&mut self.cards[card]);
        let wants: Vec<f64> = members.iter().map(|j| self.jobs[*j].duty).collect();
        let mut due = Vec::new();
        for (job, speed) in members.iter().zip(share::speeds(&wants)) {
            if (self.jobs[*job].speed - speed).abs() < 1e-12 {
                continue;
            }
            self.advance(now, *job);
            let run = &mut self.jobs[*job];
            run.speed = speed;
            run.version += 1;
            due.push(Due {
                at: now + run.left / speed.max(1e-9),
                job: *job,
                version: run.version,
            });
        }
        self.cards[card] = members;
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_that_want_the_whole_take_twice_as_long_while_both_run() {
        let mut p = Progress::new(2, 1);
        assert_eq!(p.start(0.0, 0, 0, 1.0, 10.0)[0].at, 10.0);
        // The first has done 4 of 10 when the second one comes.
        let due = p.start(4.0, 1, 0, 1.0, 3.0);
        let at = |job| due.iter().find(|d| d.job == job).copied().unwrap();
        assert_eq!((at(0).at, at(1).at), (16.0, 10.0));
        let due = p.through(10.0, 1, at(1).version).unwrap();
        assert_eq!((due[0].job, due[0].at), (0, 13.0));
        assert!(p.through(16.0, 0, at(0).version).is_none(), "that was before");
        assert_eq!(p.stop(12.0, 0).0, 1.0);
    }
}
