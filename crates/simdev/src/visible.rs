//! `CUDA_VISIBLE_DEVICES`: which devices a process sees, and in which order.

use crate::identity::{device_uuid, uuid_text};

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
