//! Reads that replicas share: a box that several ranks need is read from the files by one of them, which broadcasts it.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Tensor};

use crate::checkpoint::metadata::assign::assign_balanced;
use crate::comm::{Group, World, gather_texts};
use crate::error::{Result, Site};
use crate::fnv::fnv1a;
use crate::layout::{TensorBox, TensorMeta};

/// A box of a stored tensor, in the element type in which a rank needs it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::checkpoint) struct BoxRequest {
    /// Flat key of the tensor.
    pub(in crate::checkpoint) key: String,
    pub(in crate::checkpoint) part: TensorBox,
    pub(in crate::checkpoint) dtype: DType,
}

impl BoxRequest {
    /// The request as ranks compare it: a line that begins with the number of bytes.
    fn to_line(&self) -> String {
        let BoxRequest { key, part, dtype } = self;
        let bytes = part.volume() * dtype.size_in_bytes();
        format!("{bytes} {} {:?} {:?} {key:?}", dtype.as_str(), part.offsets, part.sizes)
    }
}

/// The number of bytes that a line begins with.
fn bytes_of_line(line: &str) -> usize {
    line.split(' ').next().and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// Boxes that this rank has without reading them now.
pub(in crate::checkpoint) type ReceivedBoxes = HashMap<BoxRequest, Tensor>;

/// Which rank reads the boxes that this rank shares with other ranks.
pub(in crate::checkpoint) struct SharedReads(Vec<SharedBox>);

struct SharedBox {
    request: BoxRequest,
    /// The ranks that need the box, ascending.
    ranks: Vec<usize>,
    reader: usize,
}

impl SharedReads {
    /// Finds the boxes that several ranks need and gives each to one of them, with the bytes that ranks read balanced.
    ///
    /// Collective: an all-gather of one hash per rank, and of the requests themselves if they differ. A box that only one rank
    /// needs, or that ranks need in different types or extents, is read by each of them and counts for the balance.
    pub(in crate::checkpoint) fn plan(world: &World, requests: Vec<BoxRequest>, site: Site) -> Result<Self> {
        let mut mine: BTreeMap<String, BoxRequest> = requests.into_iter().map(|r| (r.to_line(), r)).collect();
        let text = mine.keys().map(String::as_str).collect::<Vec<_>>().join("\n");
        let hashes = gather_texts(world, &format!("{:016x}", fnv1a(text.as_bytes())), site)?;
        let mut ranks_of: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            ranks_of.extend(mine.keys().map(|line| (line.clone(), (0..world.size()).collect())));
        } else {
            for (rank, text) in gather_texts(world, &text, site)?.iter().enumerate() {
                text.lines().for_each(|line| ranks_of.entry(line.to_string()).or_default().push(rank));
            }
        }
        let readers = assign_balanced(ranks_of.iter().map(|(line, ranks)| (bytes_of_line(line), ranks.as_slice())));
        // The order of the map is the same on all ranks, and so is the order of the broadcasts.
        let shared = ranks_of.into_iter().zip(readers).filter(|((_, ranks), _)| ranks.len() > 1);
        let mine = shared.filter_map(|((line, ranks), reader)| {
            mine.remove(&line).map(|request| SharedBox { request, ranks, reader })
        });
        Ok(SharedReads(mine.collect()))
    }

    /// Reads the boxes that this rank has to pass on. Local.
    pub(in crate::checkpoint) fn read(
        &self,
        rank: usize,
        read: &dyn Fn(&BoxRequest) -> Result<Tensor>,
    ) -> Result<ReceivedBoxes> {
        let own = self.0.iter().filter(|shared| shared.reader == rank);
        own.map(|shared| Ok((shared.request.clone(), read(&shared.request)?))).collect()
    }

    /// Returns all shared boxes, given the ones that this rank has read.
    ///
    /// Collective, after all ranks have read theirs: a broadcast per box among the ranks that need it.
    pub(in crate::checkpoint) fn exchange(&self, world: &World, own: &ReceivedBoxes) -> Result<ReceivedBoxes> {
        let mut groups: HashMap<&[usize], Group> = HashMap::new();
        let mut received = ReceivedBoxes::new();
        for SharedBox { request, ranks, reader } in &self.0 {
            if !groups.contains_key(ranks.as_slice()) {
                let members: Vec<usize> = ranks.iter().map(|&rank| world.ranks()[rank]).collect();
                groups.insert(ranks, world.subgroup(&members)?);
            }
            let root = ranks.iter().position(|rank| rank == reader).expect("a reader is one of the ranks");
            let whole = TensorMeta { shape: request.part.sizes.clone(), dtype: request.dtype };
            let tensor = groups[ranks.as_slice()].broadcast(own.get(request), &whole, root)?;
            received.insert(request.clone(), tensor);
        }
        Ok(received)
    }
}
