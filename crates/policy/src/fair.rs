//! Dominant resource fairness, as a function: who gets how much of several resources.
//!
//! Each user needs the resources in a fixed proportion. Its *dominant share* is the largest part that it has of any one of
//! them; the shares are raised together, each by its weight, until something is used up for all who want it. With dividable
//! work (the `dividable` form) nobody does better by lying about its needs, by having what another one has, or than with an
//! even part of everything, and nothing that anybody could use is left over. Users may stand in groups: a group has what its
//! weight gives it, and its users share that.
//!
//! The arbiter's turns follow the same measure over time ([`crate::Arbiter`]); this is what they approach, and what plans
//! for many cards are compared with.
//!
//! Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.

/// Someone who wants resources.
#[derive(Clone, Debug, PartialEq)]
pub struct User {
    /// What one unit of its work needs of each resource; at least one is above zero.
    pub needs: Vec<f64>,
    /// How much it weighs beside others of its group.
    pub weight: f64,
    /// Most units of work that it has.
    pub most: f64,
    /// Its group, an index into the weights of groups.
    pub group: usize,
}

impl User {
    /// A user of group 0 with weight 1 and endless work.
    #[must_use]
    pub fn new(needs: &[f64]) -> Self {
        Self {
            needs: needs.to_vec(),
            weight: 1.0,
            most: f64::INFINITY,
            group: 0,
        }
    }

    /// The part of its dominant resource that one unit of work takes.
    #[must_use]
    pub fn dominant(&self, capacity: &[f64]) -> f64 {
        let parts = self.needs.iter().zip(capacity).map(|(need, all)| need / all);
        parts.fold(0.0, f64::max)
    }
}

/// Raises everybody's dominant share together until nothing more can be given: how many units of work each gets.
///
/// `groups` are the weights of the groups. Shares rise at a rate of the group's weight over the sum of its users' weights
/// that still rise, so that a group's sum of dominant shares rises by its weight.
#[must_use]
pub fn dividable(capacity: &[f64], users: &[User], groups: &[f64]) -> Vec<f64> {
    let mut units = vec![0.0; users.len()];
    let mut left = capacity.to_vec();
    let mut rising: Vec<bool> = users
        .iter()
        .map(|u| u.most > 0.0 && u.dominant(capacity) > 0.0)
        .collect();
    // Each round uses up a resource or a user's work.
    for _ in 0..capacity.len() + users.len() {
        let weight_of = |group: usize| -> f64 {
            let members = users
                .iter()
                .zip(&rising)
                .filter(|(u, rises)| **rises && u.group == group);
            members.map(|(u, _)| u.weight).sum()
        };
        let sums: Vec<f64> = (0..groups.len()).map(weight_of).collect();
        let rates: Vec<f64> = users
            .iter()
            .zip(&rising)
            .map(|(u, rises)| {
                if *rises {
                    groups[u.group] * u.weight / sums[u.group] / u.dominant(capacity)
                } else {
                    0.0
                }
            })
            .collect();
        let mut step = f64::INFINITY;
        for (resource, room) in left.iter().enumerate() {
            let used: f64 = users
                .iter()
                .zip(&rates)
                .map(|(u, rate)| u.needs[resource] * rate)
                .sum();
            if used > 0.0 {
                step = step.min(room / used);
            }
        }
        for ((u, rate), has) in users.iter().zip(&rates).zip(&units) {
            if *rate > 0.0 {
                step = step.min((u.most - has) / rate);
            }
        }
        if !step.is_finite() {
            break;
        }
        for ((u, rate), has) in users.iter().zip(&rates).zip(&mut units) {
            *has += rate * step;
            for (room, need) in left.iter_mut().zip(&u.needs) {
                *room = (*room - need * rate * step).max(0.0);
            }
        }
        for ((u, rises), has) in users.iter().zip(&mut rising).zip(&units) {
            let blocked = u
                .needs
                .iter()
                .zip(&left)
                .zip(capacity)
                .any(|((need, room), all)| *need > 0.0 && *room <= all * 1e-12);
            *rises &= !blocked && *has < u.most * (1.0 - 1e-12);
        }
        if !rising.contains(&true) {
            break;
        }
    }
    units
}

/// The same with whole units of work, one at a time to whoever has the lowest weighted dominant share.
#[must_use]
pub fn whole(capacity: &[u64], users: &[(Vec<u64>, u64)]) -> Vec<u64> {
    let mut units = vec![0u64; users.len()];
    let mut left = capacity.to_vec();
    loop {
        // Shares are compared as fractions of the product of all capacities: exact.
        let share = |n: usize| -> (u128, u128) {
            let (needs, weight) = &users[n];
            let parts = needs.iter().zip(capacity).map(|(need, all)| {
                (
                    u128::from(*need) * u128::from(units[n]),
                    u128::from(*all).max(1) * u128::from(*weight).max(1),
                )
            });
            parts.fold((0, 1), |a, b| if b.0 * a.1 > a.0 * b.1 { b } else { a })
        };
        let fits = |n: &usize| {
            users[*n].0.iter().zip(&left).all(|(need, room)| need <= room)
                && users[*n].0.iter().any(|n| *n > 0)
        };
        let next = (0..users.len()).filter(fits).min_by(|a, b| {
            let (a, b) = (share(*a), share(*b));
            (a.0 * b.1).cmp(&(b.0 * a.1))
        });
        let Some(next) = next else {
            return units;
        };
        units[next] += 1;
        for (room, need) in left.iter_mut().zip(&users[next].0) {
            *room -= need;
        }
    }
}
