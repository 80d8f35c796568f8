//! Sorting of one sharded line: counting finds the elements that separate the shards of the result, so that every element is sent once, to
//! the rank that holds it afterwards, and shards are even.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::{Call, Group, Origin, record_implicit_operator};
use crate::error::{Error, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::ops::reductions::order_statistics::counted_bytes;
use crate::ops::shapes::arrange::signed;
use crate::placement::Placement;
use crate::tensor::{DTensor, is_recording};
use shardwise_kernels::{SortOrder, concat, contiguous, count_before, index_select, placeholder, top_k};

/// The type in which an index within a shard is sent.
const INDEX: DType = DType::U32;

impl DTensor {
    /// Sorts a line that one mesh axis shards, if exchanging its elements sends fewer bytes than gathering them. `None` if not, or if a
    /// gradient has to go back: that is a lookup by index.
    #[track_caller]
    pub(in crate::ops) fn sorted_by_exchange(
        &self,
        dim: usize,
        order: SortOrder,
    ) -> Result<Option<(DTensor, DTensor)>> {
        let n = self.shape()[dim];
        let &[axis] = self.layout().shard_order(dim) else { return Ok(None) };
        let parts = self.layout().mesh().shape()[axis];
        let size = self.dtype().size_in_bytes();
        let counts = counted_bytes(self.dtype(), parts - 1);
        // Bytes for every other rank: gathered, or counts and the share of the elements and of their indices.
        let exchanged = counts.saturating_add(n * (size + INDEX.size_in_bytes()) / parts);
        let fits = self.elem_count() == n && u32::try_from(n).is_ok() && exchanged < n * size;
        if !fits || self.layout().is_partial() || self.has_gradient() && is_recording() {
            return Ok(None);
        }
        let site = Location::caller();
        let line = self.detach().reshape(&[n as isize])?;
        if line.layout().shard_order(0) != [axis] {
            return Ok(None);
        }
        let settled = line.layout().unstrided(&|_| true)?;
        let line = record_implicit_operator("sort", || line.to_layout_at(&settled, site))?;
        let mut placements = settled.placements().to_vec();
        placements[axis] = Placement::Shard(0);
        let to = Layout::new(settled.mesh(), n, placements)?;
        let shard_of = |layout: &Layout, shard: usize| {
            let mut coordinate = vec![0; layout.mesh().ndim()];
            coordinate[axis] = shard;
            let runs = layout.owned(0, &coordinate);
            let start = runs.first().unwrap_or(n);
            start..start + runs.len()
        };
        // The first elements of all shards of the result but the first; a shard without elements begins at the end.
        let starts: Vec<i64> =
            (1..parts).map(|s| shard_of(&to, s).start).filter(|&s| s < n).map(|s| s as i64).collect();
        let places = self.constant(&Tensor::from_vec(starts.clone(), starts.len(), &Device::Cpu)?)?;
        let first_elements = line.at_places("sort", 0, order, &places)?;
        let (values, indices) = line.sorted_shards("sort", 0, order)?;
        let (world, mesh) = (self.device_mesh().world(), self.device_mesh());
        let own = settled.local_shape(world.rank())[0];
        let segments = match world.is_dry() {
            // As if every rank had as many elements for each.
            true => (0..parts).map(|s| own * (s + 1) / parts - own * s / parts).collect(),
            false => {
                let numbers = |t: &DTensor| Ok::<_, Error>(t.local().to_vec1::<i64>()?);
                let first_elements: Vec<(i64, i64)> =
                    numbers(&first_elements.ranks)?.into_iter().zip(numbers(&first_elements.indices)?).collect();
                let mut ends = count_before(values.local(), indices.local(), order, &first_elements)?;
                ends.resize(parts, own);
                let begins = std::iter::once(0).chain(ends.iter().copied());
                ends.iter().zip(begins).map(|(end, begin)| end - begin).collect::<Vec<usize>>()
            }
        };
        let group = mesh.group_of(&[axis])?;
        let exchange = Exchange { group: &group, segments: &segments, received: Vec::new(), site };
        let first = |shard: usize| shard_of(&settled, shard).start as i64;
        let (values, indices) =
            record_implicit_operator("sort", || exchange.run(values.local(), indices.local(), &first))?;
        let result = |index: usize, local: Tensor| {
            let origin = Origin::operator("sort", 0, [line.origin()].into_iter(), line.shape()).output(index);
            let dtype = local.dtype();
            DTensor::from_storage(mesh, to.clone(), local, dtype, origin)?.reshape(&signed(self.shape()))
        };
        if world.is_dry() {
            let local = |dtype: DType| placeholder(&TensorMeta::new(to.local_shape(world.rank()), dtype));
            return Ok(Some((result(0, local(self.dtype())?)?, result(1, local(DType::I64)?)?)));
        }
        // Equal elements come in the order of the shards that they were in, and of their indices there.
        let (values, at) = top_k(&values, 0, values.elem_count(), order, 0)?;
        let at: Vec<usize> = at.to_vec1::<i64>()?.into_iter().map(|i| i as usize).collect();
        Ok(Some((result(0, values)?, result(1, index_select(&indices, 0, &at)?)?)))
    }
}

/// One exchange of the segments of sorted shards.
struct Exchange<'a> {
    group: &'a Group,
    /// How many elements this rank has for every rank.
    segments: &'a [usize],
    /// How many elements this rank gets from every rank.
    received: Vec<usize>,
    site: Site,
}

impl Exchange<'_> {
    /// Sends segments of sorted elements and of their indices; `first` is the first index of the shard of a rank. Returns what this rank
    /// gets from all ranks, in their order.
    fn run(mut self, values: &Tensor, indices: &Tensor, first: &dyn Fn(usize) -> i64) -> Result<(Tensor, Tensor)> {
        let parts = self.segments.len();
        let mine: Vec<i64> = self.segments.iter().map(|&n| n as i64).collect();
        let call = Call::AllGather { dim: 0, sizes: std::iter::repeat_n(parts, parts).collect() };
        let all = self.group.run(&call, &[Tensor::from_vec(mine, parts, &Device::Cpu)?], self.site)?.swap_remove(0);
        self.received = match self.group.is_dry() {
            true => self.segments.to_vec(),
            false => all.to_vec1::<i64>()?.chunks(parts).map(|row| row[self.group.rank()] as usize).collect(),
        };
        let values = concat(&self.sent(values)?, 0)?;
        // Indices within a shard are half as long.
        let within = (indices - first(self.group.rank()) as f64)?.to_dtype(INDEX)?;
        let parts = self.sent(&within)?.into_iter().enumerate();
        let indices = parts.map(|(shard, part)| part.to_dtype(DType::I64)? + first(shard) as f64);
        let indices = indices.collect::<candle_core::Result<Vec<_>>>()?;
        Ok((values, concat(&indices, 0)?))
    }

    fn sent(&self, vector: &Tensor) -> Result<Vec<Tensor>> {
        let mut start = 0;
        let mut parts = Vec::new();
        for &len in self.segments {
            parts.push(contiguous(&vector.narrow(0, start, len)?)?);
            start += len;
        }
        let expected = self.received.iter().map(|&n| TensorMeta::new(n, vector.dtype())).collect();
        self.group.run(&Call::AllToAll { expected }, &parts, self.site)
    }
}
