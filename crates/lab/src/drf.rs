//! Dominant resource fairness: the paper's example, and its four properties on random instances.
//!
//! What is looked at is [`ebb_policy::fair`], which the arbiter's turns approach. Ghodsi et al., NSDI 2011, prove of it: everybody has at
//! least what an even part of everything would give it (*sharing*), nobody would rather have what another one has (*envy*), nobody can
//! have more without another one having less (*waste*), and who says that it needs something else than it does gets no more done (*lies*).

use ebb_policy::fair::{User, dividable, whole};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// Relative error that is the arithmetic's.
const ROUNDING: f64 = 1e-9;

/// The paper's example.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// Tasks of each user, whole ones.
    pub tasks: Vec<u64>,
    /// The part of its dominant resource that each has.
    pub dominant: Vec<f64>,
}

/// Section 4.1: 9 processors and 18 GB; a task of A needs 1 and 4, one of B 3 and 1.
#[must_use]
pub fn example() -> Example {
    let (capacity, needs) = ([9_u64, 18], [[1_u64, 4], [3, 1]]);
    let users: Vec<(Vec<u64>, u64)> = needs.iter().map(|n| (n.to_vec(), 1)).collect();
    let tasks = whole(&capacity, &users);
    let all = capacity.map(|c| c as f64);
    let dominant = needs
        .iter()
        .zip(&tasks)
        .map(|(n, tasks)| User::new(&n.map(|n| n as f64)).dominant(&all) * *tasks as f64)
        .collect();
    Example { tasks, dominant }
}

/// How often a property did not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Broken {
    /// Instances.
    pub instances: u64,
    /// Users with less than an even part would give.
    pub sharing: u64,
    /// Pairs of users one of which would rather have the other's.
    pub envy: u64,
    /// Users who could have more at nobody's cost.
    pub waste: u64,
    /// Lies that paid.
    pub lies: u64,
}

impl Broken {
    /// Nothing was.
    #[must_use]
    pub fn nothing(&self) -> bool {
        self.sharing + self.envy + self.waste + self.lies == 0
    }
}

/// Units that a user could do with an amount of each resource.
fn useful(user: &User, amounts: &[f64]) -> f64 {
    let parts = user.needs.iter().zip(amounts);
    parts
        .filter(|(need, _)| **need > 0.0)
        .map(|(need, has)| has / need)
        .fold(f64::INFINITY, f64::min)
}

/// Looks at so many random instances: up to 8 users and 5 resources, some of which some users do not need.
#[must_use]
pub fn check(seed: u64, instances: u64) -> Broken {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut below = |n: u64| rng.next_u64() % n;
    let mut broken = Broken {
        instances,
        ..Broken::default()
    };
    for _ in 0..instances {
        let resources = 1 + below(5) as usize;
        let capacity: Vec<f64> = (0..resources).map(|_| 1.0 + below(100) as f64).collect();
        let mut needs = || -> Vec<f64> {
            let mut needs: Vec<f64> = (0..resources)
                .map(|_| {
                    if below(4) == 0 {
                        0.0
                    } else {
                        1.0 + below(100) as f64
                    }
                })
                .collect();
            if needs.iter().all(|n| *n == 0.0) {
                needs[below(resources as u64) as usize] = 1.0;
            }
            needs
        };
        let count = 1 + needs().iter().map(|n| *n as u64).sum::<u64>() % 8;
        let mut users: Vec<User> = (0..count).map(|_| User::new(&needs())).collect();
        let units = dividable(&capacity, &users, &[1.0]);
        let even: Vec<f64> = capacity.iter().map(|c| c / users.len() as f64).collect();
        let used: Vec<f64> = (0..resources)
            .map(|r| users.iter().zip(&units).map(|(u, n)| u.needs[r] * n).sum())
            .collect();
        for (n, user) in users.iter().enumerate() {
            let has = units[n] * (1.0 + ROUNDING);
            broken.sharing += u64::from(has < useful(user, &even));
            for (other, theirs) in users.iter().zip(&units) {
                let bundle: Vec<f64> = other.needs.iter().map(|need| need * theirs).collect();
                broken.envy += u64::from(has < useful(user, &bundle));
            }
            let stopped =
                (0..resources).any(|r| user.needs[r] > 0.0 && used[r] >= capacity[r] * (1.0 - ROUNDING));
            broken.waste += u64::from(!stopped);
        }
        // One of them lies.
        let liar = (count - 1) as usize;
        let lie = needs();
        let truth = std::mem::replace(&mut users[liar], User::new(&lie));
        let lied = dividable(&capacity, &users, &[1.0])[liar];
        let got: Vec<f64> = lie.iter().map(|need| need * lied).collect();
        broken.lies += u64::from(useful(&truth, &got) > units[liar] * (1.0 + ROUNDING));
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_as_printed() {
        let e = example();
        assert_eq!(e.tasks, [3, 2]);
        assert!(e.dominant.iter().all(|d| (d - 2.0 / 3.0).abs() < 1e-12), "{e:?}");
    }

    #[test]
    fn the_four_properties_hold() {
        for seed in 0..5 {
            let broken = check(seed, 400);
            assert!(broken.nothing(), "seed {seed}: {broken:?}");
        }
    }
}
