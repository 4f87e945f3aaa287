//! `CUDA_VISIBLE_DEVICES`: which devices a process sees, and in which order.

use crate::config::Config;
use crate::identity::{device_uuid, slice_text, uuid_text};

/// The physical indices that are visible under `value`, in the process's order.
///
/// As the driver has it: unset shows all; the list ends at the first entry that names no device; a device named twice makes
/// the whole list invalid, and then nothing is visible; an empty value shows nothing. An entry is a plain decimal index or
/// a UUID (`GPU-` and enough digits to name one device). `CUDA_DEVICE_ORDER` changes nothing here: all devices are alike, so
/// fastest-first and bus order are the same.
#[must_use]
pub fn visible_devices(value: Option<&str>, count: u32) -> Vec<u32> {
    let Some(value) = value else {
        return (0..count).collect();
    };
    let mut visible = Vec::new();
    for entry in value.split(',') {
        let Some(index) = resolve(entry.trim(), count) else {
            break;
        };
        if visible.contains(&index) {
            return Vec::new();
        }
        visible.push(index);
    }
    visible
}

/// The same where cards are cut into devices: a program sees one of them at most. The first entry decides: a slice by its UUID (`MIG-` and
/// enough digits), or a card by its number, which means its first slice; without a mask it is the first slice of the first card.
#[must_use]
pub fn visible_slice(value: Option<&str>, config: &Config) -> Vec<u32> {
    let first = |card: u32| config.devices_of(card).next();
    let Some(value) = value else {
        return first(0).into_iter().collect();
    };
    let entry = value.split(',').next().unwrap_or("").trim();
    let found = match entry.get(..4) {
        Some(head) if head.eq_ignore_ascii_case("MIG-") && entry.len() > 4 => {
            let digits = entry[4..].to_ascii_lowercase();
            (0..config.devices).find(|device| slice_text(device_uuid(*device))[4..].starts_with(&digits))
        }
        _ => entry
            .parse()
            .ok()
            .filter(|card| *card < config.cards())
            .and_then(first),
    };
    found.into_iter().collect()
}

fn resolve(entry: &str, count: u32) -> Option<u32> {
    if let Some(prefix) = entry.get(..4).filter(|head| head.eq_ignore_ascii_case("GPU-")) {
        let digits = entry[prefix.len()..].to_ascii_lowercase();
        if digits.is_empty() {
            return None;
        }
        let mut matches = (0..count).filter(|index| uuid_text(device_uuid(*index))[4..].starts_with(&digits));
        let first = matches.next()?;
        return matches.next().is_none().then_some(first);
    }
    // The driver reads numbers as atoi does, up to the first character that is not a digit; an entry without digits names
    // nothing, and neither does a negative one.
    let digits: String = entry.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|index| *index < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slice_and_no_more() {
        let config = Config::from_lookup(|name| match name {
            "EBB_SIM_DEVICES" => Some("4".into()),
            "EBB_SIM_MIG" => Some("2".into()),
            _ => None,
        })
        .unwrap();
        let slice = |device| slice_text(device_uuid(device));
        let both = format!("{},{}", slice(3), slice(1));
        for (value, seen) in [
            (None, vec![0]),
            (Some(""), vec![]),
            (Some("1"), vec![2]),
            (Some("2"), vec![]),
            (Some("MIG-"), vec![]),
            (Some(both.as_str()), vec![3]),
            (Some(uuid_text(device_uuid(1)).as_str()), vec![]),
        ] {
            assert_eq!(visible_slice(value, &config), seen, "{value:?}");
        }
    }

    #[test]
    fn all_forms() {
        let uuid = |index| uuid_text(device_uuid(index));
        let full = format!("{},0", uuid(2));
        let prefix = uuid(1)[..8].to_owned();
        for (value, seen) in [
            (None, vec![0, 1, 2]),
            (Some(""), vec![]),
            (Some("2,0"), vec![2, 0]),
            (Some(" 1 , 2 "), vec![1, 2]),
            (Some("0,-1,1"), vec![0]),
            (Some("0,7,1"), vec![0]),
            (Some("-1"), vec![]),
            (Some("1,1"), vec![]),
            (Some("0,1,0"), vec![]),
            (Some("NoDevFiles"), vec![]),
            (Some(full.as_str()), vec![2, 0]),
            (Some(prefix.as_str()), vec![1]),
            (Some("GPU-"), vec![]),
            (Some("GPU-ffffffff"), vec![]),
        ] {
            assert_eq!(visible_devices(value, 3), seen, "{value:?}");
        }
    }
}
