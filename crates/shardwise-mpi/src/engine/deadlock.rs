//! Deadlocks: ranks that wait for each other in a cycle, each in a collective of another group.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};
use shardwise::error::RankCall;

/// Which collectives a rank is in and has started, as it reports to a rank that waits.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankActivity {
    /// Collectives that it is in now.
    pub(super) active: Vec<ActiveCollective>,
    /// Number of collectives that it has started, by group.
    pub(super) begun: HashMap<u64, u64>,
}

/// A collective that a rank is in.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ActiveCollective {
    /// Identity of the group ([`GroupState::identity`](super::groups::GroupState)).
    pub(super) group: u64,
    pub(super) ranks: Vec<usize>,
    /// How many collectives of the group it is, counted from 1.
    pub(super) number: u64,
    /// Text of the call.
    pub(super) call: String,
    pub(super) site: String,
}

impl ActiveCollective {
    /// The call as that of `rank`, for error messages.
    pub(super) fn of_rank(&self, rank: usize) -> RankCall {
        RankCall { rank, call: self.call.clone(), group: self.ranks.clone(), site: self.site.clone() }
    }
}

/// Finds the shortest cycle of waiting ranks through `start`. Each call waits for the rank of the next call, which has not
/// started that collective, and the last call waits for the first rank.
///
/// Every rank must have reported while `start` was in its current collective. Then the cycle is a deadlock: no rank on it can
/// have gone on since, because it needs the next one, and so on to `start`.
pub(super) fn find_cycle(all: &HashMap<usize, RankActivity>, start: usize) -> Option<Vec<RankCall>> {
    let next = |rank: usize| {
        let waiting = all.get(&rank).map_or(&[][..], |activity| &activity.active);
        waiting.iter().flat_map(move |waiting| {
            // A rank that has not answered may have started it.
            let late = move |other: &&usize| {
                let begun = |activity: &RankActivity| {
                    activity.begun.get(&waiting.group).copied().unwrap_or(0) >= waiting.number
                };
                **other != rank && all.get(*other).is_some_and(|activity| !begun(activity))
            };
            waiting.ranks.iter().filter(late).map(move |&other| (waiting, other))
        })
    };
    // Breadth-first search over "waits for", with the predecessor of every rank.
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

    /// A rank in one collective, given as group and number, that has started other collectives.
    fn activity(group: u64, ranks: &[usize], number: u64, begun: &[(u64, u64)]) -> RankActivity {
        let call = format!("barrier {group}");
        let active = vec![ActiveCollective { group, ranks: ranks.to_vec(), number, call, site: String::new() }];
        RankActivity { active, begun: begun.iter().copied().chain([(group, number)]).collect() }
    }

    fn ranks(all: &[(usize, RankActivity)], start: usize) -> Option<Vec<usize>> {
        let calls = find_cycle(&all.iter().cloned().collect(), start)?;
        Some(calls.iter().map(|call| call.rank).collect())
    }

    #[test]
    fn only_cycles_through_the_rank_are_found() {
        let two = [(0, activity(1, &[0, 1], 3, &[(2, 5)])), (1, activity(2, &[1, 0], 6, &[(1, 2)]))];
        assert_eq!(ranks(&two, 0), Some(vec![0, 1]));
        assert_eq!(ranks(&two, 1), Some(vec![1, 0]));
        let three =
            [(0, activity(1, &[0, 1], 1, &[])), (1, activity(2, &[1, 2], 1, &[])), (2, activity(3, &[2, 0], 1, &[]))];
        assert_eq!(ranks(&three, 0), Some(vec![0, 1, 2]));
        assert_eq!(ranks(&three, 2), Some(vec![2, 0, 1]));
        // all in one collective
        let same = [(0, activity(1, &[0, 1], 3, &[])), (1, activity(1, &[0, 1], 3, &[]))];
        assert_eq!(ranks(&same, 0), None);
        // one is late, but is in no collective
        let busy = RankActivity { active: Vec::new(), begun: HashMap::new() };
        assert_eq!(ranks(&[(0, activity(1, &[0, 1], 1, &[])), (1, busy)], 0), None);
        // one has not answered
        assert_eq!(ranks(&three[..2], 0), None);
        // a rank that waits for a cycle is not on it
        let outside = [two[0].clone(), two[1].clone(), (2, activity(4, &[0, 1, 2], 1, &[]))];
        assert_eq!(ranks(&outside, 2), None);
    }
}
