//! The transfers between any two lists of boxes: which rank sends which block to which rank.

use std::collections::HashMap;

use crate::layout::{OwnedBox, TensorBox};

/// A block that one rank sends to another, or keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BoxTransfer {
    /// Global rank of the sender.
    pub(crate) from: usize,
    /// Global rank of the receiver.
    pub(crate) to: usize,
    /// Offset of the block in the sender's local tensor.
    pub(crate) source: Vec<usize>,
    /// Offset of the block in the receiver's local tensor.
    pub(crate) target: Vec<usize>,
    /// Shape of the block.
    pub(crate) sizes: Vec<usize>,
}

/// The boxes to copy from, with the replicas of each.
pub(crate) struct SourceBoxes {
    regions: Vec<(TensorBox, Vec<OwnedBox>)>,
    /// The regions that each rank holds.
    held: HashMap<usize, Vec<usize>>,
}

impl SourceBoxes {
    pub(crate) fn new(boxes: impl IntoIterator<Item = OwnedBox>) -> Self {
        let mut place: HashMap<TensorBox, usize> = HashMap::new();
        let mut regions: Vec<(TensorBox, Vec<OwnedBox>)> = Vec::new();
        let mut held: HashMap<usize, Vec<usize>> = HashMap::new();
        for owned in boxes {
            let at = *place.entry(owned.global.clone()).or_insert_with(|| {
                regions.push((owned.global.clone(), Vec::new()));
                regions.len() - 1
            });
            held.entry(owned.rank).or_default().push(at);
            regions[at].1.push(owned);
        }
        SourceBoxes { regions, held }
    }

    /// The transfers that fill the box `target`, each element once. All ranks compute the same senders: the receiver
    /// itself if it has the box, else a replica chosen by the receiver's rank, so that replicas share the work.
    pub(crate) fn filling<'a>(&'a self, target: &'a OwnedBox) -> impl Iterator<Item = BoxTransfer> + 'a {
        (0..self.regions.len()).filter_map(move |region| self.transfer(region, target))
    }

    /// The transfers of [`filling`](Self::filling) that `rank` sends, in the same order.
    pub(crate) fn sent_by<'a>(&'a self, rank: usize, target: &'a OwnedBox) -> impl Iterator<Item = BoxTransfer> + 'a {
        let held = self.held.get(&rank).into_iter().flatten();
        held.filter_map(move |&region| self.transfer(region, target)).filter(move |t| t.from == rank)
    }

    fn transfer(&self, region: usize, target: &OwnedBox) -> Option<BoxTransfer> {
        let (region, owners) = &self.regions[region];
        let part = region.intersect(&target.global)?;
        let own = owners.iter().find(|o| o.rank == target.rank);
        let owner = own.unwrap_or(&owners[target.rank % owners.len()]);
        let local = |owned: &OwnedBox| {
            let offsets = part.offsets.iter().zip(&owned.global.offsets).zip(&owned.local_offsets);
            offsets.map(|((part, start), local)| part - start + local).collect()
        };
        Some(BoxTransfer {
            from: owner.rank,
            to: target.rank,
            source: local(owner),
            target: local(target),
            sizes: part.sizes.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::mesh::Mesh;
    use crate::placement::Placement;

    #[test]
    fn every_element_of_every_target_is_filled_once_and_replicas_share_the_work() {
        let mesh = Mesh::new([2, 3]).unwrap();
        let layouts: Vec<Layout> =
            ["S(0),R", "R,S(0)", "S(0),S(0)", "S(1),S(0)", "R,R", "SS(0,3),S(0)", "S(0;1,6),S(1)"]
                .iter()
                .map(|text| Layout::new(&mesh, (7, 5), Placement::parse_list(text).unwrap()).unwrap())
                .collect();
        for from in &layouts {
            let sources = SourceBoxes::new(from.boxes());
            for to in &layouts {
                for rank in 0..6 {
                    let filled: usize = to
                        .boxes_of(rank)
                        .iter()
                        .flat_map(|target| sources.filling(target).collect::<Vec<_>>())
                        .map(|t| t.sizes.iter().product::<usize>())
                        .sum();
                    assert_eq!(filled, to.local_shape(rank).iter().product::<usize>(), "{from} to {to}");
                }
            }
        }
        // a rank that already has its boxes receives none
        let sources = SourceBoxes::new(layouts[4].boxes());
        let own = layouts[3].boxes().flat_map(|t| sources.filling(&t).collect::<Vec<_>>()).all(|t| t.from == t.to);
        assert!(own);
    }
}
