//! Ranks that wait for each other in a circle, each in a collective of another group.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};
use shardwise::error::RankCall;

/// What a rank is doing, for one that waits.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Doing {
    /// The collectives that it is in.
    pub(super) waiting: Vec<Waiting>,
    /// Collectives that it has begun, by group.
    pub(super) begun: HashMap<u64, u64>,
}

/// A collective that a rank is in.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Waiting {
    /// Identity of the group.
    pub(super) group: u64,
    pub(super) ranks: Vec<usize>,
    /// Number of the collective in the group.
    pub(super) number: u64,
    /// The call in words.
    pub(super) call: String,
    pub(super) site: String,
}

impl Waiting {
    /// The call of a rank that is in it.
    pub(super) fn of_rank(&self, rank: usize) -> RankCall {
        RankCall { rank, call: self.call.clone(), group: self.ranks.clone(), site: self.site.clone() }
    }
}

/// The calls on a shortest circle through a rank: each waits for the rank of the next, which has not begun that collective,
/// and the last for the first.
///
/// What every rank says must have been said while `start` was where it is now. A rank on the circle cannot have gone on
/// since: it needs the next one, and so on to `start`.
pub(super) fn circle(all: &HashMap<usize, Doing>, start: usize) -> Option<Vec<RankCall>> {
    let next = |rank: usize| {
        let waiting = all.get(&rank).map_or(&[][..], |doing| &doing.waiting);
        waiting.iter().flat_map(move |waiting| {
            // A rank that has not answered may have begun it.
            let late = move |other: &&usize| {
                let begun = |doing: &Doing| doing.begun.get(&waiting.group).copied().unwrap_or(0) >= waiting.number;
                **other != rank && all.get(*other).is_some_and(|doing| !begun(doing))
            };
            waiting.ranks.iter().filter(late).map(move |&other| (waiting, other))
        })
    };
    // Breadth first over "waits for", remembering through whom each rank was found.
    let mut found: HashMap<usize, (usize, RankCall)> = HashMap::new();
    let mut open = VecDeque::from([start]);
    while let Some(rank) = open.pop_front() {
        for (waiting, other) in next(rank) {
            if other == start {
                let mut calls = vec![waiting.of_rank(rank)];
                let mut at = rank;
                while let Some((before, call)) = found.get(&at) {
                    calls.push(call.clone());
                    at = *before;
                }
                calls.reverse();
                return Some(calls);
            }
            if let Entry::Vacant(free) = found.entry(other) {
                free.insert((rank, waiting.of_rank(rank)));
                open.push_back(other);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank in one collective, given as group and number, that has begun others.
    fn doing(group: u64, ranks: &[usize], number: u64, begun: &[(u64, u64)]) -> Doing {
        let call = format!("barrier {group}");
        let waiting = vec![Waiting { group, ranks: ranks.to_vec(), number, call, site: String::new() }];
        Doing { waiting, begun: begun.iter().copied().chain([(group, number)]).collect() }
    }

    fn ranks(all: &[(usize, Doing)], start: usize) -> Option<Vec<usize>> {
        let calls = circle(&all.iter().cloned().collect(), start)?;
        Some(calls.iter().map(|call| call.rank).collect())
    }

    #[test]
    fn circles_are_found_and_nothing_else() {
        let two = [(0, doing(1, &[0, 1], 3, &[(2, 5)])), (1, doing(2, &[1, 0], 6, &[(1, 2)]))];
        assert_eq!(ranks(&two, 0), Some(vec![0, 1]));
        assert_eq!(ranks(&two, 1), Some(vec![1, 0]));
        let three = [(0, doing(1, &[0, 1], 1, &[])), (1, doing(2, &[1, 2], 1, &[])), (2, doing(3, &[2, 0], 1, &[]))];
        assert_eq!(ranks(&three, 0), Some(vec![0, 1, 2]));
        assert_eq!(ranks(&three, 2), Some(vec![2, 0, 1]));
        // all in one collective
        let same = [(0, doing(1, &[0, 1], 3, &[])), (1, doing(1, &[0, 1], 3, &[]))];
        assert_eq!(ranks(&same, 0), None);
        // one is late, but waits for nobody
        let busy = Doing { waiting: Vec::new(), begun: HashMap::new() };
        assert_eq!(ranks(&[(0, doing(1, &[0, 1], 1, &[])), (1, busy)], 0), None);
        // one has not answered
        assert_eq!(ranks(&three[..2], 0), None);
        // a rank that waits for a circle is not on it
        let outside = [two[0].clone(), two[1].clone(), (2, doing(4, &[0, 1, 2], 1, &[]))];
        assert_eq!(ranks(&outside, 2), None);
    }
}
