//! Deadlocks: ranks that wait for each other in a cycle, each in a collective of another group or for a message.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};
use shardwise::error::RankCall;

/// What a rank waits for and has started, as it reports to a rank that waits.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct RankActivity {
    /// Collectives that it is in now.
    pub(super) active: Vec<ActiveCollective>,
    /// Number of collectives that it has started, by group.
    pub(super) begun: HashMap<u64, u64>,
    /// The message that it waits for now.
    pub(super) receiving: Option<ActiveReceive>,
    /// Number of messages that it has sent to every rank.
    pub(super) sent: Vec<u64>,
}

impl RankActivity {
    /// The calls that the rank is in, for error messages.
    pub(super) fn calls(&self, rank: usize) -> impl Iterator<Item = RankCall> + '_ {
        let receive = self.receiving.iter().map(|receive| receive.call.clone());
        self.active.iter().map(move |waiting| waiting.of_rank(rank)).chain(receive)
    }
}

/// A message that a rank waits for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ActiveReceive {
    pub(super) from: usize,
    /// Number of messages from that rank that have arrived, none of which is the one.
    pub(super) arrived: u64,
    /// How many receives of this rank it is, counted from 1.
    pub(super) number: u64,
    pub(super) call: RankCall,
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
/// started that collective or sent that message, and the last call waits for the first rank.
///
/// Every rank must have reported while `start` was in its current collective. Then the cycle is a deadlock: no rank on it can
/// have gone on since, because it needs the next one, and so on to `start`.
pub(super) fn find_cycle(all: &HashMap<usize, RankActivity>, start: usize) -> Option<Vec<RankCall>> {
    let collectives = |rank: usize| {
        let waiting = all.get(&rank).map_or(&[][..], |activity| &activity.active);
        waiting.iter().flat_map(move |waiting| {
            // A rank that has not answered may have started it.
            let late = move |other: &&usize| {
                let begun = |activity: &RankActivity| {
                    activity.begun.get(&waiting.group).copied().unwrap_or(0) >= waiting.number
                };
                **other != rank && all.get(*other).is_some_and(|activity| !begun(activity))
            };
            waiting.ranks.iter().filter(late).map(move |&other| (waiting.of_rank(rank), other))
        })
    };
    let receives = |rank: usize| {
        let receive = all.get(&rank).and_then(|activity| activity.receiving.as_ref());
        // Otherwise the message may be on its way.
        let unsent = move |receive: &&ActiveReceive| {
            let sent = all.get(&receive.from).and_then(|sender| sender.sent.get(rank));
            sent.is_some_and(|&sent| sent == receive.arrived)
        };
        receive.filter(unsent).map(|receive| (receive.call.clone(), receive.from))
    };
    let next = |rank: usize| collectives(rank).chain(receives(rank));
    // Breadth-first search over "waits for", with the predecessor of every rank.
    let mut found: HashMap<usize, (usize, RankCall)> = HashMap::new();
    let mut open = VecDeque::from([start]);
    while let Some(rank) = open.pop_front() {
        for (call, other) in next(rank) {
            if other == start {
                let mut calls = vec![call];
                let mut at = rank;
                while let Some((before, call)) = found.get(&at) {
                    calls.push(call.clone());
                    at = *before;
                }
                calls.reverse();
                return Some(calls);
            }
            if let Entry::Vacant(free) = found.entry(other) {
                free.insert((rank, call));
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
        let begun = begun.iter().copied().chain([(group, number)]).collect();
        RankActivity { active, begun, ..RankActivity::default() }
    }

    /// A rank that waits for a message, having sent some messages to every rank.
    fn receiving(from: usize, arrived: u64, sent: &[u64]) -> RankActivity {
        let call = RankCall { rank: 0, call: "recv".into(), group: Vec::new(), site: String::new() };
        let receiving = Some(ActiveReceive { from, arrived, number: 1, call });
        RankActivity { receiving, sent: sent.to_vec(), ..RankActivity::default() }
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
        let busy = RankActivity::default();
        assert_eq!(ranks(&[(0, activity(1, &[0, 1], 1, &[])), (1, busy)], 0), None);
        // one has not answered
        assert_eq!(ranks(&three[..2], 0), None);
        // a rank that waits for a cycle is not on it
        let outside = [two[0].clone(), two[1].clone(), (2, activity(4, &[0, 1, 2], 1, &[]))];
        assert_eq!(ranks(&outside, 2), None);
    }
    #[test]
    fn receives_wait_for_ranks_that_have_sent_nothing_more() {
        let length =
            |all: &[(usize, RankActivity)]| find_cycle(&all.iter().cloned().collect(), 0).map(|calls| calls.len());
        let each_other = [(0, receiving(1, 2, &[0, 3])), (1, receiving(0, 3, &[2, 0]))];
        assert_eq!(length(&each_other), Some(2));
        // A message of rank 1 is on its way.
        assert_eq!(length(&[each_other[0].clone(), (1, receiving(0, 3, &[3, 0]))]), None);
        // Rank 0 is in a collective that rank 1 has not started.
        let barrier = RankActivity { sent: vec![0, 3], ..activity(1, &[0, 1], 1, &[]) };
        assert_eq!(length(&[(0, barrier), each_other[1].clone()]), Some(2));
        // A message to oneself.
        assert_eq!(length(&[(0, receiving(0, 0, &[0]))]), Some(1));
    }
}
