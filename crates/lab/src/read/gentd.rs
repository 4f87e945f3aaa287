//! A serving cluster's recordings: memory and duty cycle of containers over time, and requests for models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ebb_units::Bytes;

use super::table::{LATEST, Table, TableError, at_most, find, number};

/// Requests may lie so many seconds apart at most: what is kept for how long is looked at every few seconds of all of it.
const LONGEST: f64 = 400.0 * 86_400.0;
/// The longest answer, seconds.
const LONGEST_ANSWER: f64 = 30.0 * 86_400.0;
/// The most samples of all containers together.
const MOST_SAMPLES: usize = 100_000_000;
/// The most bytes of a container: a pebibyte.
const MOST_BYTES: f64 = 1_125_899_906_842_624.0;

/// The folder of the recordings inside a folder of many; the folder itself if it is one.
#[must_use]
pub fn folder(data: &Path) -> PathBuf {
    let inner = data.join("alibaba-gentd26");
    if inner.is_dir() { inner } else { data.to_owned() }
}

/// A request for a model that was answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// When it came, seconds from the first one's day.
    pub at: f64,
    /// How long its answer took, seconds.
    pub took: f64,
    /// The model, numbered by first appearance.
    pub model: u32,
    /// Who sent it, numbered by first appearance.
    pub tenant: u32,
}

/// The answered requests, in order of time.
///
/// # Errors
/// The table is not there, or a line of it is wrong.
pub fn requests(data: &Path) -> Result<Vec<Request>, TableError> {
    let path = find(&folder(data), "lora_request_trace")?;
    let mut table = Table::open(
        &path,
        [
            "gmt_create",
            "predict_status",
            "exec_time_seconds",
            "groupId",
            "checkpoint_model_version_id",
        ],
    )?;
    let (mut models, mut tenants) = (Numbers::default(), Numbers::default());
    let mut requests = Vec::new();
    while let Some(request) = table.next_as(|[at, status, took, tenant, model]| {
        if status != "SUCCEED" || model.is_empty() {
            return Ok(None);
        }
        Ok(Some(Request {
            at: at_most(moment(at)?, LATEST, "a time")?,
            took: at_most(number(took)?.unwrap_or(0.0), LONGEST_ANSWER, "a duration")?,
            model: models.of(model),
            tenant: tenants.of(tenant),
        }))
    })? {
        requests.extend(request);
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    let span = match (requests.first(), requests.last()) {
        (Some(first), Some(last)) => last.at - first.at,
        _ => return Err(table.whole("no request in it that was answered (`SUCCEED`)")),
    };
    if span > LONGEST {
        let days = (span / 86_400.0).ceil();
        return Err(table.whole(format!(
            "its requests lie {days} days apart, more than 400: is one of the times wrong?"
        )));
    }
    // Whole days are kept, so that the hour of the day stays what it was.
    let first = requests
        .first()
        .map_or(0.0, |r| (r.at / 86_400.0).floor() * 86_400.0);
    for request in &mut requests {
        request.at -= first;
    }
    Ok(requests)
}

/// What containers held and how busy they were, on one grid of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Seconds between two samples.
    pub period: f64,
    /// Samples.
    pub steps: usize,
    /// The containers, by name.
    pub containers: Vec<Container>,
}

/// One container over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Container {
    /// What is anonymised and the same in all files.
    pub name: String,
    /// Bytes held at each sample; nothing where there is no sample.
    pub bytes: Vec<Option<Bytes>>,
    /// Share of the sample in which its kernels ran, 0 to 1; 0 where there is no sample.
    pub duty: Vec<f64>,
}

impl Container {
    /// The most bytes that it held at once.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.bytes.iter().flatten().copied().max().unwrap_or_default()
    }

    /// The samples from its first one to its last.
    #[must_use]
    pub fn life(&self) -> std::ops::Range<usize> {
        let first = self.bytes.iter().position(Option::is_some).unwrap_or(0);
        let end = self.bytes.iter().rposition(Option::is_some).map_or(0, |n| n + 1);
        first..end
    }

    /// Bytes in use at a sample: held while its kernels ran.
    #[must_use]
    pub fn in_use(&self, step: usize) -> Option<Bytes> {
        self.bytes[step].filter(|_| self.duty[step] > 0.0)
    }
}

/// The recording of memory and duty cycle.
///
/// # Errors
/// A table is not there, or a line of one is wrong.
pub fn recording(data: &Path) -> Result<Recording, TableError> {
    let dir = folder(data);
    let read = |name: &str| -> Result<BTreeMap<String, BTreeMap<u64, f64>>, TableError> {
        let path = find(&dir, name)?;
        let mut table = Table::open(&path, ["timestamp_anon", "value", "container_ip"])?;
        let mut all: BTreeMap<String, BTreeMap<u64, f64>> = BTreeMap::new();
        while let Some(sample) = table.next_as(|[at, value, container]| {
            let named = !container.is_empty() && container != "NULL";
            let (Some(at), Some(value)) = (number(at)?, number(value)?) else {
                return Ok(None);
            };
            let at = at_most(at, LATEST, "a time")?.round() as u64;
            let value = at_most(value, MOST_BYTES, "a value")?;
            Ok(named.then(|| (container.to_owned(), at, value)))
        })? {
            if let Some((container, at, value)) = sample {
                all.entry(container).or_default().insert(at, value);
            }
        }
        if all.is_empty() {
            return Err(table.whole("no sample of a container in it"));
        }
        Ok(all)
    };
    let memory = read("pod_gpu_memory_used_bytes_anon")?;
    let duty = read("pod_gpu_duty_cycle_anon")?;
    let mut times: Vec<u64> = memory.values().flat_map(|m| m.keys().copied()).collect();
    times.sort_unstable();
    times.dedup();
    let mut gaps: Vec<u64> = times.windows(2).map(|w| w[1] - w[0]).collect();
    gaps.sort_unstable();
    let period = gaps.get(gaps.len() / 2).copied().unwrap_or(60).max(1);
    let (first, last) = (
        times.first().copied().unwrap_or(0),
        times.last().copied().unwrap_or(0),
    );
    let step = |at: u64| ((at.saturating_sub(first) + period / 2) / period) as usize;
    let steps = if times.is_empty() { 0 } else { step(last) + 1 };
    if steps.saturating_mul(memory.len()) > MOST_SAMPLES {
        let days = (last - first) / 86_400;
        return Err(TableError::Whole {
            path: find(&dir, "pod_gpu_memory_used_bytes_anon")?,
            what: format!(
                "its samples lie {days} days apart, mostly {period} s after each other: is one of the times wrong?"
            ),
        });
    }
    let containers = memory
        .iter()
        .map(|(name, samples)| {
            let mut out = Container {
                name: name.clone(),
                bytes: vec![None; steps],
                duty: vec![0.0; steps],
            };
            for (at, bytes) in samples {
                out.bytes[step(*at)] = Some(Bytes(bytes.max(0.0) as u64));
            }
            for (at, percent) in duty.get(name).into_iter().flatten() {
                if let Some(duty) = out.duty.get_mut(step(*at)).filter(|_| *at >= first) {
                    *duty = (percent / 100.0).clamp(0.0, 1.0);
                }
            }
            out
        })
        .collect();
    Ok(Recording {
        period: period as f64,
        steps,
        containers,
    })
}

/// Names as numbers, by first appearance.
#[derive(Debug, Default)]
struct Numbers(BTreeMap<String, u32>);

impl Numbers {
    fn of(&mut self, name: &str) -> u32 {
        if let Some(n) = self.0.get(name) {
            return *n;
        }
        let n = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.insert(name.to_owned(), n);
        n
    }
}

/// `2024-11-15 16:57:50` as seconds since 1970, or a plain number of seconds.
fn moment(text: &str) -> Result<f64, String> {
    let wrong = || format!("expected a time such as 2024-11-15 16:57:50, found `{text}`");
    if let Ok(Some(seconds)) = number(text) {
        return Ok(seconds);
    }
    let (date, time) = text.split_once([' ', 'T']).ok_or_else(wrong)?;
    let numbers = |text: &str, by: char| -> Option<[f64; 3]> {
        let mut parts = text.trim_end_matches('Z').split(by);
        let mut next = || parts.next()?.parse::<f64>().ok();
        let out = [next()?, next()?, next()?];
        parts.next().is_none().then_some(out)
    };
    let [y, m, d] = numbers(date, '-').ok_or_else(wrong)?;
    let [hours, minutes, seconds] = numbers(time, ':').ok_or_else(wrong)?;
    if !(1.0..=12.0).contains(&m) || !(1.0..=31.0).contains(&d) || hours >= 24.0 || minutes >= 60.0 {
        return Err(wrong());
    }
    // Years are counted from March on, so that the leap day is the last one.
    let (y, m) = if m > 2.0 { (y, m - 3.0) } else { (y - 1.0, m + 9.0) };
    let days = 365.0 * y + (y / 4.0).floor() - (y / 100.0).floor()
        + (y / 400.0).floor()
        + ((153.0 * m + 2.0) / 5.0).floor()
        + d
        - 719_469.0;
    Ok(days * 86_400.0 + hours * 3600.0 + minutes * 60.0 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(moment("1970-01-01 00:00:00"), Ok(0.0));
        assert_eq!(moment("2024-11-15 16:57:50"), Ok(1_731_689_870.0));
        assert_eq!(moment("2024-02-29T23:59:59"), Ok(1_709_251_199.0));
        assert_eq!(moment("1662858720.0"), Ok(1_662_858_720.0));
        for wrong in ["", "2024-11-15", "2024-13-15 00:00:00", "yesterday 10:00:00"] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}
