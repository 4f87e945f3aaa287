//! [`Gaps`]: what needs no predictor: fixed times, and the optimum that knows.

use crate::read::gentd::Request;

use super::{Kind, Outcome};

/// The idle times between the uses of each model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gaps {
    /// Idle times above zero, the shortest first, seconds.
    gaps: Vec<f64>,
    /// Requests that found their model in use.
    within: usize,
    /// Models, each of which had a first request.
    models: usize,
}

impl Gaps {
    /// Of requests in order of time.
    #[must_use]
    pub fn of(requests: &[Request]) -> Self {
        let mut ends: Vec<Option<f64>> = Vec::new();
        let mut out = Self::default();
        for r in requests {
            let place = r.model as usize;
            if place >= ends.len() {
                ends.resize(place + 1, None);
            }
            let end = r.at + r.took;
            ends[place] = Some(match ends[place] {
                None => {
                    out.models += 1;
                    end
                }
                Some(last) => {
                    if r.at > last {
                        out.gaps.push(r.at - last);
                    } else {
                        out.within += 1;
                    }
                    last.max(end)
                }
            });
        }
        out.gaps.sort_by(f64::total_cmp);
        out
    }

    fn requests(&self) -> usize {
        self.gaps.len() + self.within + self.models
    }

    fn outcome(&self, kind: Kind, warm: usize, idle: f64) -> Outcome {
        let cold = self.models + self.gaps.len() - warm;
        Outcome {
            kind,
            idle_hours: idle / 3600.0,
            cold_percent: 100.0 * cold as f64 / self.requests().max(1) as f64,
        }
    }

    /// Kept for so many seconds after each use, the last one included.
    #[must_use]
    pub fn fixed(&self, seconds: f64) -> Outcome {
        let warm = self.gaps.partition_point(|g| *g <= seconds);
        let idle: f64 = self.gaps.iter().map(|g| g.min(seconds)).sum();
        self.outcome(Kind::Fixed(seconds), warm, idle + seconds * self.models as f64)
    }

    /// The shortest gaps that so many hours pay for.
    #[must_use]
    pub fn optimal(&self, seconds: f64, hours: f64) -> Outcome {
        let (mut warm, mut idle) = (0, 0.0);
        for gap in &self.gaps {
            if idle + gap > hours * 3600.0 {
                break;
            }
            idle += gap;
            warm += 1;
        }
        self.outcome(Kind::Optimal(seconds), warm, idle)
    }
}
