//! `ebb bench disk`: segments to files and back, beside the disk's own rates in the same run. No GPU is needed.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use ebb_node::{DiskContent, DiskPlan, DiskRates, HostMemory, Packing, measure_disk};
use ebb_units::{Bytes, GRANULE};
use serde::Serialize;

use super::figure::{self, Figure};
use crate::error::{CliError, Result};

/// `ebb bench disk`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb bench disk /var/cache
  ebb bench disk /mnt/nvme --bytes 16Gi --threads 8 --seconds 300 --json
  ebb bench disk /mnt/nvme --compress none,lz4,zstd --content weights

The limit is what the disk does with the same calls from the same threads, without hashing, copying and making segments.
Files are removed at the end.")]
pub(crate) struct DiskArgs {
    /// A folder on the disk
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// What is written and read back each time
    #[arg(long, value_name = "SIZE", default_value = "4Gi", allow_hyphen_values = true)]
    pub bytes: Bytes,
    /// In segments of this size
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "256Mi",
        allow_hyphen_values = true
    )]
    pub segment: Bytes,
    /// Threads that write and read
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// How often
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Ends after so many seconds, with what was measured by then
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Pack what is written in this way; several: one after the other
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        value_delimiter = ',',
        default_value = "none"
    )]
    pub compress: Vec<Compress>,
    /// What is written: noise, which nobody can pack, or numbers as in the weights of a model (bfloat16)
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Content::Noise)]
    pub content: Content,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// How blocks are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compress {
    None,
    Lz4,
    Zstd,
}

impl From<Compress> for Packing {
    fn from(compress: Compress) -> Self {
        match compress {
            Compress::None => Self::None,
            Compress::Lz4 => Self::Lz4,
            Compress::Zstd => Self::Zstd,
        }
    }
}

/// What is in the memory that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Content {
    Noise,
    Weights,
}

/// What packing makes of the bytes.
#[derive(Debug, Serialize)]
struct Stored {
    compress: &'static str,
    /// Bytes of the files over bytes of the segments.
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    dir: String,
    way: &'static str,
    direct: bool,
    threads: u32,
    rounds: u32,
    content: &'static str,
    stored: Vec<Stored>,
    figures: Vec<Figure>,
}

pub(crate) fn disk(args: &DiskArgs) -> Result<()> {
    let segment = args.segment.round_down(GRANULE);
    if segment.is_zero() || segment > Bytes::gib(16) || args.bytes < segment {
        return Err(CliError::usage(
            "a segment is 2 MiB to 16 GiB, and what is written is one segment at least",
            "raise --bytes or choose another --segment",
        ));
    }
    // The segments, and those that are read into.
    let needed = Bytes(args.bytes.0.saturating_mul(2)) + segment;
    let left = HostMemory::read().default_budget();
    if needed > left {
        return Err(CliError::usage(
            format!("this takes {needed} of host memory, and {left} can be used"),
            "lower --bytes",
        ));
    }
    let plan = DiskPlan {
        dir: args.dir.clone(),
        bytes: args.bytes,
        segment,
        threads: args.threads as usize,
        rounds: args.rounds,
        packings: args.compress.iter().map(|how| (*how).into()).collect(),
        content: match args.content {
            Content::Noise => DiskContent::Noise,
            Content::Weights => DiskContent::Weights,
        },
        within: std::time::Duration::from_secs(args.seconds.into()),
    };
    let rates = measure_disk(&plan, &super::say)
        .map_err(|error| CliError::failed(format!("{} cannot be measured: {error}", args.dir.display())));
    super::unsay();
    let rates = rates?;
    let report = Report {
        dir: args.dir.display().to_string(),
        way: rates.way,
        direct: rates.direct,
        threads: args.threads,
        rounds: u32::try_from(rates.write.len()).unwrap_or(args.rounds),
        content: match args.content {
            Content::Noise => "noise",
            Content::Weights => "weights",
        },
        stored: stored(&rates),
        figures: figures(args.bytes, rates),
    };
    let mut out = anstream::stdout();
    if args.json {
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
    } else {
        let cache = if report.direct { "past" } else { "through" };
        writeln!(
            out,
            "{}: {}, {cache} the page cache, {} threads, medians of {}",
            report.dir, report.way, report.threads, report.rounds
        )?;
        figure::write(&report.figures, &mut out)?;
        for one in report.stored.iter().filter(|one| one.compress != "none") {
            writeln!(
                out,
                "{}: files of {:.1} % of the segments ({})",
                one.compress,
                100.0 * one.ratio,
                report.content
            )?;
        }
    }
    Ok(())
}

fn stored(rates: &DiskRates) -> Vec<Stored> {
    let ways = rates.ways.iter();
    ways.map(|way| Stored {
        compress: way.packing.name(),
        ratio: way.stored,
    })
    .collect()
}

/// The rates of packed segments are of the segments' bytes, too: above 1 is a disk that packing makes faster.
fn figures(bytes: Bytes, rates: DiskRates) -> Vec<Figure> {
    let (write, read) = (rates.write, rates.read);
    let mut figures = Vec::new();
    for way in rates.ways {
        let (spill, load) = match way.packing {
            Packing::None => ("spill", "load"),
            Packing::Lz4 => ("spill, lz4", "load, lz4"),
            Packing::Zstd => ("spill, zstd", "load, zstd"),
        };
        let (own_writes, own_reads) = ("the disk's own writes", "the disk's own reads");
        figures.push(Figure::rates(
            spill,
            bytes.0,
            own_writes,
            way.spill,
            write.clone(),
        ));
        figures.push(Figure::rates(load, bytes.0, own_reads, way.load, read.clone()));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use ebb_node::PackedRates;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: DiskArgs,
    }

    #[test]
    fn a_ratio_is_that_of_the_pairs() {
        let rates = DiskRates {
            write: vec![2.0, 4.0, 8.0],
            read: vec![1.0],
            ways: [Packing::None, Packing::Zstd]
                .map(|packing| PackedRates {
                    packing,
                    spill: vec![1.0, 4.0, 8.0],
                    load: vec![3.0],
                    stored: 0.7,
                })
                .to_vec(),
            way: "x",
            direct: true,
        };
        let figures = figures(Bytes::gib(1), rates);
        assert_eq!(
            (figures[0].ebb, figures[0].limit, figures[0].ratio),
            (4.0, 4.0, 1.0)
        );
        assert_eq!(figures[1].ratio, 3.0);
        let names: Vec<&str> = figures.iter().map(|figure| figure.what).collect();
        assert_eq!(names, ["spill", "load", "spill, zstd", "load, zstd"]);
    }

    #[test]
    fn it_measures_a_folder_and_refuses_what_makes_no_sense() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().to_str().unwrap();
        let line = |more: &[&str]| Line::parse_from([&["ebb", dir][..], more].concat()).args;
        let small = [
            "--bytes",
            "8Mi",
            "--segment",
            "4Mi",
            "--rounds",
            "1",
            "--threads",
            "2",
        ];
        assert!(disk(&line(&small)).is_ok());
        let all = ["--compress", "none,lz4,zstd", "--content", "weights"];
        assert!(disk(&line(&[&small[..], &all].concat())).is_ok());
        assert!(disk(&line(&["--bytes", "1Mi", "--segment", "2Mi"])).is_err());
        assert!(disk(&line(&["--bytes", "900Ti"])).is_err());
    }
}
