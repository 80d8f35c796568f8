//! [`BoxExchange`]: one all-to-all in which every rank receives the boxes that it lacks.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::boxes::{BoxTransfer, SourceBoxes};
use crate::comm::{Call, Group};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorMeta};
use shardwise_kernels::{Assembly, placeholder};

/// One rank's part of an exchange of boxes within a group.
#[derive(Clone)]
pub(crate) struct BoxExchange {
    group: Group,
    call: Call,
    dtype: DType,
    /// What this rank sends to each other rank of the group. What it keeps is copied to its new place directly.
    outgoing: Vec<Vec<BoxTransfer>>,
    /// For every rank the first one that is sent the same blocks: they are packed once for all of them.
    packed_for: Vec<usize>,
    /// What this rank receives from each rank of the group, or keeps.
    incoming: Vec<Vec<BoxTransfer>>,
}

impl BoxExchange {
    /// Plans this rank's part. `before` and `after` return the boxes of any rank of the group.
    pub(crate) fn new(
        group: Group,
        dtype: DType,
        before: impl Fn(usize) -> Vec<OwnedBox>,
        after: impl Fn(usize) -> Vec<OwnedBox>,
    ) -> Self {
        let (ranks, me) = (group.ranks(), group.global_rank());
        let sources = SourceBoxes::new(ranks.iter().flat_map(|&rank| before(rank)));
        let position = |rank: usize| ranks.iter().position(|&r| r == rank).expect("owners are in the group");
        let sent = |rank: usize| -> Vec<BoxTransfer> {
            after(rank).iter().flat_map(|target| sources.sent_by(me, target).collect::<Vec<_>>()).collect()
        };
        let outgoing = ranks.iter().map(|&rank| if rank == me { Vec::new() } else { sent(rank) });
        let outgoing: Vec<Vec<BoxTransfer>> = outgoing.collect();
        // Offsets and sizes of the blocks that a rank is sent.
        type Blocks<'a> = Vec<(&'a [usize], &'a [usize])>;
        let mut first: HashMap<Blocks<'_>, usize> = HashMap::new();
        let packed_for = outgoing.iter().enumerate().map(|(to, transfers)| {
            let blocks = transfers.iter().map(|t| (t.source.as_slice(), t.sizes.as_slice())).collect();
            *first.entry(blocks).or_insert(to)
        });
        let packed_for = packed_for.collect();
        let mut incoming: Vec<Vec<BoxTransfer>> = vec![Vec::new(); ranks.len()];
        for target in after(me) {
            for transfer in sources.filling(&target) {
                incoming[position(transfer.from)].push(transfer);
            }
        }
        let call = call_for(&group, &incoming, dtype);
        BoxExchange { call, group, dtype, outgoing, packed_for, incoming }
    }

    /// The same exchange of elements of another type.
    pub(crate) fn of_type(&self, dtype: DType) -> Self {
        BoxExchange { call: call_for(&self.group, &self.incoming, dtype), dtype, ..self.clone() }
    }

    /// Executes the exchange. Returns the blocks that this rank received, with their offsets in its new local tensor; none
    /// in a dry run. Collective over the group.
    pub(crate) fn run(&self, local: &Tensor, site: Site) -> Result<Vec<(Vec<usize>, Tensor)>> {
        self.run_with(&|offsets, sizes| block(local, offsets, sizes), site)
    }

    /// As [`run`](Self::run), with a function that returns the block of given offsets and sizes in place of a tensor.
    pub(crate) fn run_with(&self, source: BlockSource<'_>, site: Site) -> Result<Vec<(Vec<usize>, Tensor)>> {
        let mut pieces: Vec<Tensor> = Vec::with_capacity(self.outgoing.len());
        for (to, transfers) in self.outgoing.iter().enumerate() {
            let first = self.packed_for[to];
            pieces.push(if first < to { pieces[first].clone() } else { self.pack(source, transfers)? });
        }
        let got = self.group.run(&self.call, &pieces, site)?;
        let mut blocks = Vec::new();
        if self.group.is_dry() {
            return Ok(blocks);
        }
        for (from, (piece, transfers)) in got.iter().zip(&self.incoming).enumerate() {
            if from == self.group.rank() {
                for kept in transfers {
                    blocks.push((kept.target.clone(), source(&kept.source, &kept.sizes)?));
                }
                continue;
            }
            let mut start = 0;
            for transfer in transfers {
                let count = transfer.sizes.iter().product();
                let block = match transfers.len() {
                    1 => piece.clone(),
                    _ => piece.narrow(0, start, count)?.reshape(transfer.sizes.as_slice())?,
                };
                start += count;
                blocks.push((transfer.target.clone(), block));
            }
        }
        Ok(blocks)
    }

    /// Executes the exchange and assembles the blocks into a new local tensor of the type and shape `after`.
    pub(crate) fn assemble(&self, local: &Tensor, after: &TensorMeta, site: Site) -> Result<Tensor> {
        self.assemble_with(&|offsets, sizes| block(local, offsets, sizes), after, site)
    }

    /// As [`assemble`](Self::assemble), with a source as in [`run_with`](Self::run_with).
    pub(crate) fn assemble_with(&self, source: BlockSource<'_>, after: &TensorMeta, site: Site) -> Result<Tensor> {
        let blocks = self.run_with(source, site)?;
        if self.group.is_dry() {
            return Ok(placeholder(after)?);
        }
        let got: usize = blocks.iter().map(|(_, block)| block.elem_count()).sum();
        if got != after.elem_count() {
            let needed = format!("{} elements, which {after} has", after.elem_count());
            let fix = "ask for boxes that the ranks of the group have, each once";
            return Err(ErrorKind::Operands.error("exchange of boxes", format!("{got} elements"), needed, fix));
        }
        let whole = Assembly::new(after.clone())?;
        for (offsets, block) in &blocks {
            // SAFETY: one thread; the blocks are disjoint and fill the boxes that make up the local tensor.
            unsafe { whole.paste(block, offsets) };
        }
        // SAFETY: the blocks are disjoint and have as many elements as the local tensor.
        Ok(unsafe { whole.finish() })
    }

    /// The tensor sent to one rank: a view if it is one block, else all blocks one after the other.
    fn pack(&self, source: BlockSource<'_>, transfers: &[BoxTransfer]) -> Result<Tensor> {
        let meta = TensorMeta { shape: packed_shape(transfers), dtype: self.dtype };
        if self.group.is_dry() || transfers.is_empty() {
            return Ok(placeholder(&meta)?);
        }
        let block = |transfer: &BoxTransfer| source(&transfer.source, &transfer.sizes);
        if let [single] = transfers {
            return block(single);
        }
        let packed = Assembly::new(meta)?;
        let mut from = 0;
        for transfer in transfers {
            let block = block(transfer)?;
            assert!(block.dims() == transfer.sizes && block.dtype() == self.dtype, "the block that was asked for");
            // SAFETY: one thread; the tensor has the type of the blocks and as many elements as all of them together.
            unsafe { packed.paste_flat(&block, from) };
            from += block.elem_count();
        }
        // SAFETY: the blocks fill the tensor.
        Ok(unsafe { packed.finish() })
    }
}

/// The call in which every rank of the group sends this rank what it lacks.
fn call_for(group: &Group, incoming: &[Vec<BoxTransfer>], dtype: DType) -> Call {
    let lacking = |(from, transfers): (usize, &Vec<BoxTransfer>)| {
        let shape = if from == group.rank() { vec![0] } else { packed_shape(transfers) };
        TensorMeta { shape, dtype }
    };
    Call::AllToAll { expected: incoming.iter().enumerate().map(lacking).collect() }
}

/// A function that returns the block of given offsets and sizes.
type BlockSource<'a> = &'a dyn Fn(&[usize], &[usize]) -> Result<Tensor>;

/// A block of a tensor, as a view.
pub(crate) fn block(tensor: &Tensor, offsets: &[usize], sizes: &[usize]) -> Result<Tensor> {
    let mut view = tensor.clone();
    for (dim, (&start, &size)) in offsets.iter().zip(sizes).enumerate() {
        view = view.narrow(dim, start, size)?;
    }
    Ok(view)
}

/// One block keeps its shape; several are packed into one dimension.
fn packed_shape(transfers: &[BoxTransfer]) -> Vec<usize> {
    match transfers {
        [] => vec![0],
        [single] => single.sizes.clone(),
        many => vec![many.iter().map(|t| t.sizes.iter().product::<usize>()).sum()],
    }
}
