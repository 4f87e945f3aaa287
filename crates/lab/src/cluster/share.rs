//! GPU time of one card among those who run on it: even parts, and who wants less leaves the rest to others.

/// What each gets of a whole, for what each wants.
#[must_use]
pub fn even(wants: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by(|a, b| wants[*a].total_cmp(&wants[*b]));
    let mut gets = vec![0.0; wants.len()];
    let mut left = 1.0;
    for (n, who) in order.iter().enumerate() {
        let part: f64 = left / (wants.len() - n) as f64;
        gets[*who] = part.min(wants[*who].max(0.0));
        left -= gets[*who];
    }
    gets
}

/// How fast each goes, 1 being as alone.
#[must_use]
pub fn speeds(wants: &[f64]) -> Vec<f64> {
    even(wants)
        .iter()
        .zip(wants)
        .map(|(gets, wants)| if *wants > 0.0 { gets / wants } else { 1.0 })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_little_gets_it_and_the_others_share_the_rest() {
        assert_eq!(speeds(&[0.3, 0.5]), [1.0, 1.0]);
        let s = speeds(&[0.2, 1.0, 1.0]);
        assert!((s[0] - 1.0).abs() < 1e-12 && (s[1] - 0.4).abs() < 1e-12 && (s[2] - 0.4).abs() < 1e-12);
        assert_eq!(speeds(&[0.0]), [1.0]);
    }
}
