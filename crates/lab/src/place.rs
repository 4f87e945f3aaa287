//! [`Placer`]: which card a container goes to, knowing only what has been.
//!
//! A card is on while somebody on it is busy, or while bytes are still leaving it. Busy containers are packed by two measures,
//! bytes and GPU time. A container that wakes stays where it is if it still fits there; else it goes to the fullest card that
//! has room for it. Before one more
//! card is turned on than the operator has, others move to make room: one or two, two that change places, or a few cards are packed anew.

use ebb_units::Bytes;

/// What a busy container takes of its card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    pub(crate) bytes: Bytes,
    /// Share of the card's GPU time.
    pub(crate) duty: f64,
}

/// A container's place.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Place {
    card: Option<usize>,
    load: Option<Load>,
}

/// What the cards carry.
#[derive(Debug)]
pub(crate) struct Placer {
    card: Bytes,
    /// Busy containers of each card.
    busy: Vec<Vec<usize>>,
    sums: Vec<Load>,
    on: Vec<bool>,
    places: Vec<Place>,
    /// Cards that are there: more are turned on only if nothing else helps.
    pool: usize,
    /// There are no more: who fits nowhere goes to the card that carries least.
    fixed: bool,
    /// Others are moved to make room.
    deep: bool,
}

/// Where a container goes, and who makes room for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Move {
    pub(crate) container: usize,
    pub(crate) card: usize,
}

/// The most containers that are moved to make room for one.
const DEEP: usize = 2;
/// With more cards nobody is moved to make room: there is nearly always some elsewhere.
const DEEP_CARDS: usize = 128;
/// GPU time is compared with this much slack for the sum's rounding.
const ROUNDING: f64 = 1e-9;

impl Placer {
    pub(crate) fn new(cards: usize, card: Bytes, containers: usize, pool: usize) -> Self {
        Self {
            card,
            busy: vec![Vec::new(); cards],
            sums: vec![Load::default(); cards],
            on: vec![false; cards],
            places: vec![Place::default(); containers],
            pool,
            fixed: false,
            deep: true,
        }
    }

    /// So many cards, all of them on for ever.
    pub(crate) fn fixed(cards: usize, card: Bytes, containers: usize) -> Self {
        Self {
            on: vec![true; cards],
            fixed: true,
            deep: cards <= DEEP_CARDS,
            ..Self::new(cards, card, containers, cards)
        }
    }

    /// A container begins on the fullest card that has room for it, if one has; nobody moves for it.
    pub(crate) fn begin(
        &mut self,
        container: usize,
        load: Load,
        may: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let card = (0..self.on.len())
            .filter(|card| self.on[*card] && self.fits(*card, load) && may(*card))
            .max_by_key(|card| (self.sums[*card].bytes, usize::MAX - card))?;
        self.put(container, card, load);
        Some(card)
    }

    /// A container becomes busy where it is, whatever else is there.
    pub(crate) fn stay(&mut self, container: usize, load: Load) {
        if let Some(card) = self.places[container].card {
            self.put(container, card, load);
        }
    }

    /// The container is gone.
    pub(crate) fn forget(&mut self, container: usize) {
        self.idle(container);
        self.places[container].card = None;
    }

    /// Whether a card carries more than it can.
    pub(crate) fn over(&self, card: usize) -> bool {
        !self.within(self.sums[card])
    }

    /// One container that goes from a card that carries too much to one that has room: the one with the fewest bytes of those
    /// that are enough, else of all.
    pub(crate) fn ease(&mut self, card: usize) -> Option<Move> {
        if self.busy[card].len() < 2 || !self.over(card) {
            return None;
        }
        let sum = self.sums[card];
        let mut movers: Vec<(bool, Bytes, usize, Load)> = self.busy[card]
            .iter()
            .map(|c| {
                let load = self.places[*c].load.unwrap_or_default();
                (!self.within(less(sum, load)), load.bytes, *c, load)
            })
            .collect();
        movers.sort_by_key(|m| (m.0, m.1, m.2));
        for (_, _, container, load) in movers {
            if let Some(to) = self.fullest(load, Some(card)) {
                self.put(container, to, load);
                return Some(Move { container, card: to });
            }
        }
        None
    }

    pub(crate) fn load_of(&self, card: usize) -> Load {
        self.sums[card]
    }

    pub(crate) fn is_on(&self, card: usize) -> bool {
        self.on[card]
    }

    pub(crate) fn nobody_busy(&self, card: usize) -> bool {
        self.busy[card].is_empty()
    }

    pub(crate) fn cards_on(&self) -> usize {
        self.on.iter().filter(|on| **on).count()
    }

    /// The card is given back.
    pub(crate) fn turn_off(&mut self, card: usize) {
        self.on[card] = false;
    }

    pub(crate) fn card_of(&self, container: usize) -> Option<usize> {
        self.places[container].card
    }

    /// The container is not busy any more; it stays where it is.
    pub(crate) fn idle(&mut self, container: usize) {
        let place = &mut self.places[container];
        if let (Some(card), Some(_)) = (place.card, place.load.take()) {
            self.busy[card].retain(|c| *c != container);
            self.sum(card);
        }
    }

    /// A busy container's load is another one.
    pub(crate) fn change(&mut self, container: usize, load: Load) {
        if let Some(card) = self.places[container].card {
            self.places[container].load = Some(load);
            self.sum(card);
        }
    }

    /// A container becomes busy: where it goes, and who makes room before it.
    pub(crate) fn wake(&mut self, container: usize, load: Load) -> Vec<Move> {
        let home = self.places[container].card;
        let mut moves = Vec::new();
        let card = match home {
            Some(card) if self.on[card] && self.fits(card, load) => card,
            _ => self.find(load, None, &mut moves),
        };
        self.put(container, card, load);
        moves.push(Move { container, card });
        moves
    }

    /// Moves containers off a card that carries more than it can, until it does not.
    pub(crate) fn relieve(&mut self, card: usize) -> Vec<Move> {
        let mut moves = Vec::new();
        while self.busy[card].len() > 1 && !self.within(self.sums[card]) {
            // Whoever is enough alone and has the fewest bytes to move; else the largest.
            let sum = self.sums[card];
            let load = |c: usize| self.places[c].load.unwrap_or_default();
            let enough = |c: &usize| self.within(less(sum, load(*c)));
            let mover = self.busy[card]
                .iter()
                .copied()
                .filter(enough)
                .min_by_key(|c| (load(*c).bytes, *c))
                .or_else(|| {
                    self.busy[card]
                        .iter()
                        .copied()
                        .max_by_key(|c| (load(*c).bytes, *c))
                });
            let Some(mover) = mover else { break };
            let load = load(mover);
            self.idle(mover);
            let to = self.find(load, Some(card), &mut moves);
            self.put(mover, to, load);
            moves.push(Move {
                container: mover,
                card: to,
            });
        }
        moves
    }

    /// Cards that carry more than they can.
    pub(crate) fn overloaded(&self) -> Vec<usize> {
        (0..self.sums.len())
            .filter(|card| !self.within(self.sums[*card]))
            .collect()
    }

    fn find(&mut self, load: Load, not: Option<usize>, moves: &mut Vec<Move>) -> usize {
        if let Some(card) = self.fullest(load, not) {
            return card;
        }
        if self.deep
            && self.cards_on() >= self.pool
            && let Some((card, chain)) = self
                .by_moves(load, &mut not.into_iter().collect(), DEEP)
                .or_else(|| self.by_swap(load, not))
                .or_else(|| self.by_repacking(load, not))
        {
            for Move { container, card } in chain {
                let load = self.places[container].load.unwrap_or_default();
                self.put(container, card, load);
                moves.push(Move { container, card });
            }
            return card;
        }
        if self.fixed {
            return self.least(load);
        }
        // Cards are as many as containers: one is free.
        let card = (0..self.on.len())
            .find(|card| !self.on[*card] && Some(*card) != not)
            .unwrap_or(0);
        self.on[card] = true;
        card
    }

    /// The card that carries least of what a load needs most.
    fn least(&self, load: Load) -> usize {
        let part = |card: usize| {
            let sum = plus(self.sums[card], load);
            (sum.bytes.0 as f64 / self.card.0 as f64).max(sum.duty)
        };
        (0..self.on.len())
            .min_by(|a, b| part(*a).total_cmp(&part(*b)))
            .unwrap_or(0)
    }

    /// The card that is on and fits with the least room left.
    fn fullest(&self, load: Load, not: Option<usize>) -> Option<usize> {
        (0..self.on.len())
            .filter(|card| self.on[*card] && Some(*card) != not && self.fits(*card, load))
            .max_by_key(|card| (self.sums[*card].bytes, usize::MAX - card))
    }

    /// A card that would fit if one of its containers went elsewhere, and who goes where for it, in order: the fewest moves, and
    /// among as many the fewest bytes. `closed` cards stay as they are.
    fn by_moves(&self, load: Load, closed: &mut Vec<usize>, depth: usize) -> Option<(usize, Vec<Move>)> {
        let mut best: Option<(usize, Bytes, usize, Vec<Move>)> = None;
        for depth in 1..=depth {
            for card in 0..self.on.len() {
                if !self.on[card] || closed.contains(&card) {
                    continue;
                }
                for mover in &self.busy[card] {
                    let its = self.places[*mover].load.unwrap_or_default();
                    if !self.within(plus(less(self.sums[card], its), load)) {
                        continue;
                    }
                    closed.push(card);
                    let found = self.elsewhere(*mover, its, closed, depth);
                    closed.pop();
                    let Some(chain) = found else { continue };
                    let bytes = chain
                        .iter()
                        .map(|m| self.places[m.container].load.unwrap_or_default().bytes)
                        .sum();
                    if best.as_ref().is_none_or(|b| (chain.len(), bytes) < (b.0, b.1)) {
                        best = Some((chain.len(), bytes, card, chain));
                    }
                }
            }
            if best.is_some() {
                break;
            }
        }
        best.map(|(_, _, card, chain)| (card, chain))
    }

    /// A card that would fit if one of its containers changed places with one of another card: the fewest bytes.
    fn by_swap(&self, load: Load, not: Option<usize>) -> Option<(usize, Vec<Move>)> {
        let open: Vec<usize> = (0..self.on.len())
            .filter(|card| self.on[*card] && Some(*card) != not)
            .collect();
        let its = |c: usize| self.places[c].load.unwrap_or_default();
        let mut best: Option<(Bytes, usize, Vec<Move>)> = None;
        for card in &open {
            for out in &self.busy[*card] {
                let rest = plus(less(self.sums[*card], its(*out)), load);
                if !self.within(rest) {
                    continue;
                }
                for other in open.iter().filter(|other| *other != card) {
                    for back in &self.busy[*other] {
                        let bytes = its(*out).bytes + its(*back).bytes;
                        let there = plus(less(self.sums[*other], its(*back)), its(*out));
                        if best.as_ref().is_some_and(|b| b.0 <= bytes)
                            || !self.within(plus(rest, its(*back)))
                            || !self.within(there)
                        {
                            continue;
                        }
                        let moves = [(*out, *other), (*back, *card)]
                            .map(|(container, card)| Move { container, card });
                        best = Some((bytes, *card, moves.to_vec()));
                    }
                }
            }
        }
        best.map(|(_, card, moves)| (card, moves))
    }

    /// A card that would fit if a few cards were packed anew: as few as possible, those with the most room first.
    fn by_repacking(&self, load: Load, not: Option<usize>) -> Option<(usize, Vec<Move>)> {
        let mut cards: Vec<usize> = (0..self.on.len())
            .filter(|card| self.on[*card] && Some(*card) != not && self.within(self.sums[*card]))
            .collect();
        cards.sort_by_key(|card| (self.sums[*card].bytes, *card));
        (3..=cards.len()).find_map(|count| {
            let cards = &cards[..count];
            self.repack(load, cards, true)
                .or_else(|| self.repack(load, cards, false))
        })
    }

    /// Packs what is on these cards and one more load onto the same cards, the largest first; `stay`: where it is if that fits,
    /// else always the fullest.
    fn repack(&self, load: Load, cards: &[usize], stay: bool) -> Option<(usize, Vec<Move>)> {
        // The new load has no container yet.
        let mut items: Vec<(Load, Option<usize>)> = cards
            .iter()
            .flat_map(|card| &self.busy[*card])
            .map(|c| (self.places[*c].load.unwrap_or_default(), Some(*c)))
            .collect();
        items.push((load, None));
        items.sort_by_key(|(load, c)| (core::cmp::Reverse(load.bytes), *c));
        let mut sums = vec![Load::default(); cards.len()];
        let mut home = None;
        let mut moves = Vec::new();
        for (load, container) in items {
            let now = container.and_then(|c| self.places[c].card);
            let place = (0..cards.len())
                .filter(|n| self.within(plus(sums[*n], load)))
                .max_by_key(|n| (stay && Some(cards[*n]) == now, sums[*n].bytes, usize::MAX - n))?;
            sums[place] = plus(sums[place], load);
            match container {
                None => home = Some(cards[place]),
                Some(c) if now != Some(cards[place]) => moves.push(Move {
                    container: c,
                    card: cards[place],
                }),
                Some(_) => {}
            }
        }
        home.map(|card| (card, moves))
    }

    /// How a container gets to another card, with up to so many moves.
    fn elsewhere(
        &self,
        mover: usize,
        load: Load,
        closed: &mut Vec<usize>,
        depth: usize,
    ) -> Option<Vec<Move>> {
        let direct = (0..self.on.len())
            .filter(|to| self.on[*to] && !closed.contains(to) && self.fits(*to, load))
            .max_by_key(|to| (self.sums[*to].bytes, usize::MAX - to));
        let (card, mut chain) = match direct {
            Some(card) => (card, Vec::new()),
            None if depth > 1 => self.by_moves(load, closed, depth - 1)?,
            None => return None,
        };
        chain.push(Move {
            container: mover,
            card,
        });
        Some(chain)
    }

    /// A container becomes busy on a card, whatever else is there.
    pub(crate) fn put(&mut self, container: usize, card: usize, load: Load) {
        self.idle(container);
        self.places[container] = Place {
            card: Some(card),
            load: Some(load),
        };
        self.busy[card].push(container);
        self.sum(card);
    }

    fn sum(&mut self, card: usize) {
        let loads = self.busy[card].iter().filter_map(|c| self.places[*c].load);
        self.sums[card] = loads.fold(Load::default(), plus);
    }

    fn fits(&self, card: usize, load: Load) -> bool {
        self.within(plus(self.sums[card], load))
    }

    fn within(&self, load: Load) -> bool {
        load.bytes <= self.card && load.duty <= 1.0 + ROUNDING
    }
}

fn plus(a: Load, b: Load) -> Load {
    Load {
        bytes: a.bytes + b.bytes,
        duty: a.duty + b.duty,
    }
}

fn less(a: Load, b: Load) -> Load {
    Load {
        bytes: a.bytes.saturating_sub(b.bytes),
        duty: (a.duty - b.duty).max(0.0),
    }
}
