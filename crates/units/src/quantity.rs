//! Amounts as people write them: the Kubernetes quantity syntax.

use core::str::FromStr;

use crate::Bytes;

/// Why a text is no amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Nothing was written.
    #[error("the size is empty; write one like 20Gi, 512Mi or 1500M")]
    Empty,
    /// The digits are no number.
    #[error("`{0}` is not a size: expected digits and a unit, like 20Gi, 512Mi or 1500M")]
    NotANumber(String),
    /// The unit is unknown.
    #[error(
        "`{unit}` in `{text}` is not a unit; use Ki, Mi, Gi, Ti (powers of 1024) or k, M, G, T (powers of 1000)"
    )]
    UnknownUnit {
        /// What was written.
        text: String,
        /// The part that is no unit.
        unit: String,
    },
    /// A negative amount.
    #[error("`{0}` is negative; a size is zero or more")]
    Negative(String),
    /// A fraction of a byte.
    #[error("`{0}` is not a whole number of bytes")]
    NotWhole(String),
    /// More than 2^64 - 1 bytes.
    #[error("`{0}` is too large: the largest size is 16Ei less one byte")]
    TooLarge(String),
}

impl FromStr for Bytes {
    type Err = QuantityError;

    /// Reads a quantity: decimal digits, an optional fraction, and a unit (`Ki Mi Gi Ti Pi Ei`, `k M G T P E`, or an
    /// exponent such as `1e9`). A trailing `B` or `iB` as in `20GiB` is accepted, since people write it.
    ///
    /// # Errors
    /// [`QuantityError`] says what is wrong with the text.
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let whole = text.trim();
        if whole.is_empty() {
            return Err(QuantityError::Empty);
        }
        if whole.starts_with('-') {
            return Err(QuantityError::Negative(whole.into()));
        }
        let body = whole.strip_prefix('+').unwrap_or(whole);
        let end = body
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(body.len());
        let (digits, unit) = body.split_at(end);
        let (mantissa, fraction_digits) = parse_decimal(digits, whole)?;
        let (base, power) = parse_unit(unit.trim(), whole)?;
        scale(mantissa, fraction_digits, base, power, whole)
    }
}

/// The digits without their point, and how many stood behind it.
fn parse_decimal(digits: &str, whole: &str) -> Result<(u128, u32), QuantityError> {
    let bad = || QuantityError::NotANumber(whole.into());
    let (int, frac) = digits.split_once('.').unwrap_or((digits, ""));
    if (int.is_empty() && frac.is_empty()) || frac.contains('.') {
        return Err(bad());
    }
    let frac = frac.trim_end_matches('0');
    if int.len() + frac.len() > 36 {
        return Err(QuantityError::TooLarge(whole.into()));
    }
    let joined = format!("{int}{frac}");
    let mantissa = if joined.is_empty() {
        0
    } else {
        joined.parse().map_err(|_| bad())?
    };
    Ok((mantissa, u32::try_from(frac.len()).map_err(|_| bad())?))
}

/// A unit as base and power: `Gi` is 2^30, `M` is 10^6.
fn parse_unit(unit: &str, whole: &str) -> Result<(u128, u32), QuantityError> {
    let bad = || QuantityError::UnknownUnit {
        text: whole.into(),
        unit: unit.into(),
    };
    if let Some(exponent) = unit.strip_prefix(['e', 'E'])
        && exponent.starts_with(|c: char| c.is_ascii_digit() || c == '+')
    {
        let power: u32 = exponent
            .strip_prefix('+')
            .unwrap_or(exponent)
            .parse()
            .map_err(|_| bad())?;
        return if power <= 30 {
            Ok((10, power))
        } else {
            Err(QuantityError::TooLarge(whole.into()))
        };
    }
    let stem = unit.strip_suffix('B').unwrap_or(unit);
    Ok(match stem {
        "" => (10, 0),
        "Ki" => (2, 10),
        "Mi" => (2, 20),
        "Gi" => (2, 30),
        "Ti" => (2, 40),
        "Pi" => (2, 50),
        "Ei" => (2, 60),
        "k" => (10, 3),
        "M" => (10, 6),
        "G" => (10, 9),
        "T" => (10, 12),
        "P" => (10, 15),
        "E" => (10, 18),
        _ => return Err(bad()),
    })
}

fn scale(
    mantissa: u128,
    fraction_digits: u32,
    base: u128,
    power: u32,
    whole: &str,
) -> Result<Bytes, QuantityError> {
    let too_large = || QuantityError::TooLarge(whole.into());
    let factor = base.pow(power);
    let product = mantissa.checked_mul(factor).ok_or_else(too_large)?;
    let divisor = 10u128.pow(fraction_digits);
    if product % divisor != 0 {
        // `1.3Gi` is no whole number of bytes, and nobody means the exact fraction: round down as long as at
        // least one byte is left, refuse what is only a fraction of a byte.
        if base == 10 && power < fraction_digits || product / divisor == 0 {
            return Err(QuantityError::NotWhole(whole.into()));
        }
    }
    u64::try_from(product / divisor)
        .map(Bytes)
        .map_err(|_| too_large())
}

impl Bytes {
    /// The shortest quantity that reads back as exactly this amount (`20Gi`, `1536Mi`, `1000`).
    #[must_use]
    pub fn to_quantity(self) -> String {
        for (unit, shift) in [
            ("Ei", 60),
            ("Pi", 50),
            ("Ti", 40),
            ("Gi", 30),
            ("Mi", 20),
            ("Ki", 10),
        ] {
            if self.0 != 0 && self.0.is_multiple_of(1 << shift) {
                return format!("{}{unit}", self.0 >> shift);
            }
        }
        self.0.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<u64, QuantityError> {
        text.parse::<Bytes>().map(Bytes::get)
    }

    #[test]
    fn reads_what_people_write() {
        assert_eq!(read("20Gi"), Ok(20 << 30));
        assert_eq!(read("20GiB"), Ok(20 << 30));
        assert_eq!(read(" 512Mi "), Ok(512 << 20));
        assert_eq!(read("1.5Gi"), Ok(3 << 29));
        assert_eq!(read("1500M"), Ok(1_500_000_000));
        assert_eq!(read("1e9"), Ok(1_000_000_000));
        assert_eq!(read("2E"), Ok(2_000_000_000_000_000_000));
        assert_eq!(read("0"), Ok(0));
        assert_eq!(read("4096"), Ok(4096));
        assert_eq!(read("1.3Gi"), Ok(1_395_864_371));
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(read(""), Err(QuantityError::Empty));
        assert!(matches!(read("lots"), Err(QuantityError::NotANumber(_))));
        assert!(matches!(read("1.2.3Gi"), Err(QuantityError::NotANumber(_))));
        assert!(matches!(read("-1Gi"), Err(QuantityError::Negative(_))));
        assert!(matches!(read("20Gb"), Err(QuantityError::UnknownUnit { .. })));
        assert!(matches!(read("20 gigs"), Err(QuantityError::UnknownUnit { .. })));
        assert!(matches!(read("1.5"), Err(QuantityError::NotWhole(_))));
        assert!(matches!(read("16Ei"), Err(QuantityError::TooLarge(_))));
        assert!(matches!(read("1e400"), Err(QuantityError::TooLarge(_))));
        assert!(matches!(
            read("9".repeat(80).as_str()),
            Err(QuantityError::TooLarge(_))
        ));
    }

    proptest! {
        #[test]
        fn a_written_amount_reads_back(n: u64) {
            prop_assert_eq!(Bytes(n).to_quantity().parse::<Bytes>(), Ok(Bytes(n)));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<Bytes>();
        }
    }
}
