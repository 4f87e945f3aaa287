//! [`Figure`]: what was measured, beside what it is compared with in the same run.

use std::io::Write;

use serde::Serialize;

use crate::table::{Align, Table};

/// What a figure counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    /// More is better.
    BytesPerS,
    /// Less is better.
    Seconds,
    /// Less is better.
    Bytes,
}

impl Unit {
    pub(super) fn show(self, value: f64) -> String {
        match self {
            Self::BytesPerS => format!("{:.1} GB/s", value / 1e9),
            Self::Bytes if value.abs() < 1e9 => format!("{:.1} MB", value / 1e6),
            Self::Bytes => format!("{:.2} GB", value / 1e9),
            Self::Seconds if value.abs() < 1e-6 => format!("{:.0} ns", value * 1e9),
            Self::Seconds if value.abs() < 1e-3 => format!("{:.2} us", value * 1e6),
            Self::Seconds if value.abs() < 1.0 => format!("{:.1} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
        }
    }
}

/// A part of what a figure measures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Phase {
    /// The figure.
    pub of: &'static str,
    /// The part.
    pub what: String,
    /// Seconds, of each round.
    pub samples: Vec<f64>,
}

impl Phase {
    /// A line for a person.
    pub(super) fn line(&self) -> String {
        let median = Unit::Seconds.show(median(&self.samples));
        format!("{}: {} {median}", self.of, self.what)
    }
}

/// One result. Its JSON form is what programs read: the fields and their order stay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Figure {
    /// Its name.
    pub what: &'static str,
    /// How much was moved or allocated at a time; 0 if that means nothing here.
    pub bytes: u64,
    /// Of all values.
    pub unit: Unit,
    /// The median of `samples`.
    pub ebb: f64,
    /// What it is compared with.
    pub against: &'static str,
    /// The median of `limits`: the machine's own limit, or the same without ebb.
    pub limit: f64,
    /// `ebb` over `limit`: the median of the pairs where they were measured in turn.
    pub ratio: f64,
    /// Every measurement.
    pub samples: Vec<f64>,
    /// Every measurement of what it is compared with.
    pub limits: Vec<f64>,
}

impl Figure {
    /// From measurements that were made in turn: pair by pair.
    pub(super) fn paired(
        what: &'static str,
        bytes: u64,
        against: &'static str,
        samples: Vec<f64>,
        limits: Vec<f64>,
    ) -> Self {
        let pairs = samples.iter().zip(&limits).map(|(ebb, plain)| ebb / plain);
        let ratio = median(&pairs.collect::<Vec<_>>());
        Self {
            what,
            bytes,
            unit: Unit::Seconds,
            ebb: median(&samples),
            against,
            limit: median(&limits),
            ratio,
            samples,
            limits,
        }
    }

    /// Rates of moving `bytes`, from the seconds that it took, against the rates of the link.
    pub(super) fn rate(
        what: &'static str,
        bytes: u64,
        against: &'static str,
        seconds: &[f64],
        limits: Vec<f64>,
    ) -> Self {
        let samples: Vec<f64> = seconds.iter().map(|s| bytes as f64 / s).collect();
        let (ebb, limit) = (median(&samples), median(&limits));
        Self {
            what,
            bytes,
            unit: Unit::BytesPerS,
            ebb,
            against,
            limit,
            ratio: ebb / limit,
            samples,
            limits,
        }
    }
}

impl Figure {
    /// Rates that were measured in turn: pair by pair.
    pub(super) fn rates(
        what: &'static str,
        bytes: u64,
        against: &'static str,
        samples: Vec<f64>,
        limits: Vec<f64>,
    ) -> Self {
        Self {
            unit: Unit::BytesPerS,
            ..Self::paired(what, bytes, against, samples, limits)
        }
    }
}

impl Figure {
    /// Memory that something takes, beside what it would take otherwise.
    pub(super) fn bytes(
        what: &'static str,
        bytes: u64,
        against: &'static str,
        samples: Vec<f64>,
        limits: Vec<f64>,
    ) -> Self {
        let (ebb, limit) = (median(&samples), median(&limits));
        Self {
            unit: Unit::Bytes,
            ratio: ebb / limit,
            ..Self::paired(what, bytes, against, samples, limits)
        }
    }
}

/// The middle one; of an even number the mean of the two.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The table for people.
pub(super) fn write(figures: &[Figure], to: &mut impl Write) -> std::io::Result<()> {
    let mut table = Table::new(&[
        ("WHAT", Align::Left),
        ("SIZE", Align::Right),
        ("EBB", Align::Right),
        ("LIMIT", Align::Right),
        ("RATIO", Align::Right),
        ("LIMIT IS", Align::Left),
    ]);
    for figure in figures {
        table.row(vec![
            figure.what.into(),
            if figure.bytes == 0 {
                "-".into()
            } else {
                ebb_units::Bytes(figure.bytes).to_string()
            },
            figure.unit.show(figure.ebb),
            figure.unit.show(figure.limit),
            format!("{:.3}", figure.ratio),
            figure.against.into(),
        ]);
    }
    table.write(to, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
        // By pairs: a machine that slows down for both slows neither against the other.
        let figure = Figure::paired("x", 0, "plain", vec![2.0, 20.0, 3.0], vec![1.0, 10.0, 2.0]);
        assert_eq!((figure.ebb, figure.limit, figure.ratio), (3.0, 2.0, 2.0));
        let figure = Figure::rate("x", 100, "link", &[2.0, 4.0, 5.0], vec![50.0]);
        assert_eq!((figure.ebb, figure.ratio), (25.0, 0.5));
    }

    #[test]
    fn figures_are_shown_in_units_that_can_be_read() {
        let seconds = |value| Unit::Seconds.show(value);
        assert_eq!(
            [seconds(3.4e-9), seconds(1.62e-6), seconds(0.0451), seconds(2.0)],
            ["3 ns", "1.62 us", "45.1 ms", "2.00 s"]
        );
        assert_eq!(Unit::BytesPerS.show(55.24e9), "55.2 GB/s");
    }
}
