//! [`Group`]: collectives and point-to-point messages, as programs call them.

use std::borrow::Cow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::call::Call;
use super::{Communicator, ExposedTensors};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::module_scope::user_site;
use crate::placement::ReduceOp;
use crate::rank_context::{RankContext, in_scope};
use shardwise_kernels::{check_stored, own_copy};

/// A group of ranks that communicate, as one of its ranks sees it.
///
/// A method is a collective unless its documentation says otherwise: every rank of the group must call it, in the same
/// order. If ranks make different calls, all of them get [`Error::Mismatch`](crate::Error::Mismatch) with two ranks and
/// the two source lines; a call whose partner never comes ends in an error instead of a hang. Tensor sizes may differ
/// between ranks and may be zero. Reductions combine operands in rank order, so their results are bitwise the same on
/// every rank and in every run.
///
/// Ranks and roots in arguments are ranks within the group, not global ranks as in PyTorch. Only the thread that runs the
/// rank's program may make collectives; a call from another thread is an error on every rank, because the order of two
/// threads' calls would differ between ranks.
///
/// An input may be overwritten as soon as the call returns. Where ranks are threads and would still read it (small
/// tensors, `broadcast`, `all_to_all`, `send`, `expose`), it is copied first. A result is detached from candle's own
/// autograd. Ranks that are threads may share the memory of a large result: `copy()` it before writing into it with
/// `slice_set`. On a group of one rank, or as the root of a broadcast between processes, the result may be the input
/// itself, unless that is a `candle_core::Var`.
///
/// # Errors
/// Every collective returns, on all ranks: [`Error::Rejected`](crate::Error::Rejected) if the arguments of a rank are
/// invalid, [`Error::Mismatch`](crate::Error::Mismatch) if ranks make different calls,
/// [`Error::Deadlock`](crate::Error::Deadlock), [`Error::PeerFailed`](crate::Error::PeerFailed),
/// [`Error::PeerLeft`](crate::Error::PeerLeft) or [`Error::Timeout`](crate::Error::Timeout) if a rank will not join.
///
/// ```
/// # use shardwise::{launch, ReduceOp};
/// use shardwise::candle_core::{Device, Tensor};
///
/// launch(3, |world| {
///     let mine = Tensor::full(world.rank() as f32, 2, &Device::Cpu)?;
///     let sum = world.all_reduce(&mine, ReduceOp::Sum)?;
///     assert_eq!(sum.to_vec1::<f32>()?, [3.0, 3.0]);
///     Ok(())
/// })?;
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "ProcessGroup")]
#[derive(Clone)]
pub struct Group {
    engine: Arc<dyn Communicator>,
    /// The mesh axes that it spans, for the trace.
    axes: Option<Arc<str>>,
}

impl Group {
    /// Creates a group from an engine's communicator.
    pub fn new(engine: Arc<dyn Communicator>) -> Self {
        Group { engine, axes: None }
    }

    /// The same group with the names of the mesh axes that it spans.
    pub(super) fn along(self, axes: &str) -> Self {
        Group { axes: Some(axes.into()), ..self }
    }

    /// This rank's number within the group. Local.
    #[doc(alias = "get_rank")]
    #[doc(alias = "get_group_rank")]
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Number of ranks of the group. Local.
    #[doc(alias = "get_world_size")]
    pub fn size(&self) -> usize {
        self.engine.ranks().len()
    }

    /// Global ranks of the group, in group order. Local.
    #[doc(alias = "get_process_group_ranks")]
    pub fn ranks(&self) -> &[usize] {
        self.engine.ranks()
    }

    /// This rank's number in the world. Local.
    #[doc(alias = "get_global_rank")]
    pub fn global_rank(&self) -> usize {
        self.ranks()[self.rank()]
    }

    /// Waits until every rank of the group has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(&Call::Barrier, &[], Location::caller()).map(drop)
    }

    /// Checks that all ranks pass the same numbers, such as a seed or a step.
    ///
    /// `what` names the numbers in the error, which every rank gets if they differ. Costs one small message.
    ///
    /// ```
    /// # use shardwise::launch;
    /// let error = launch(2, |world| world.agree("step", &[world.rank() as u64]));
    /// assert!(error.unwrap_err().to_string().contains("agree(step [1])"));
    /// ```
    #[track_caller]
    pub fn agree(&self, what: &'static str, values: &[u64]) -> Result<()> {
        self.run(&Call::Agree { what, values: values.into() }, &[], Location::caller()).map(drop)
    }

    /// Reduces tensors of one shape over the group; every rank gets the result.
    ///
    /// Returns a new tensor, unlike PyTorch's in-place call.
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.single(&Call::AllReduce { op }, Some(tensor), Location::caller())
    }

    /// Reduces tensors of one shape over the group; the root gets the result, other ranks `None`.
    #[track_caller]
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Option<Tensor>> {
        self.at_most_one(&Call::Reduce { op, root }, Some(tensor), Location::caller())
    }

    /// Concatenates the tensors of all ranks along `dim` in rank order; every rank gets the result.
    ///
    /// `sizes` are the sizes of the ranks' tensors along `dim`: they may differ and may be zero, and nothing is padded.
    ///
    /// ```
    /// # use shardwise::launch;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(3, |world| {
    ///     let mine = Tensor::full(world.rank() as u32, world.rank(), &Device::Cpu)?; // rank 0 has no elements
    ///     let all = world.all_gather(&mine, 0, &[0, 1, 2])?;
    ///     assert_eq!(all.to_vec1::<u32>()?, [1, 2, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "all_gather_into_tensor")]
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Tensor> {
        self.single(&Call::AllGather { dim, sizes: sizes.into() }, Some(tensor), Location::caller())
    }

    /// As [`all_gather`](Self::all_gather), but only the root gets the result, other ranks `None`.
    #[track_caller]
    pub fn gather(&self, tensor: &Tensor, dim: usize, sizes: &[usize], root: usize) -> Result<Option<Tensor>> {
        self.at_most_one(&Call::Gather { dim, sizes: sizes.into(), root }, Some(tensor), Location::caller())
    }

    /// Reduces tensors of one shape and splits the result along `dim` into pieces of `sizes`; every rank gets its piece.
    #[doc(alias = "reduce_scatter_tensor")]
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp, dim: usize, sizes: &[usize]) -> Result<Tensor> {
        self.single(&Call::ReduceScatter { op, dim, sizes: sizes.into() }, Some(tensor), Location::caller())
    }

    /// Splits the root's tensor along `dim` into pieces of `sizes`; every rank gets its piece.
    ///
    /// The root passes the tensor, other ranks `None`; all ranks pass its type and shape as `whole`.
    #[track_caller]
    pub fn scatter(
        &self,
        tensor: Option<&Tensor>,
        whole: &TensorMeta,
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<Tensor> {
        let call = Call::Scatter { whole: whole.clone(), dim, sizes: sizes.into(), root };
        self.single(&call, tensor, Location::caller())
    }

    /// Copies the root's tensor to every rank.
    ///
    /// The root passes the tensor, other ranks `None`; all ranks pass its type and shape as `whole`.
    #[track_caller]
    pub fn broadcast(&self, tensor: Option<&Tensor>, whole: &TensorMeta, root: usize) -> Result<Tensor> {
        self.single(&Call::Broadcast { whole: whole.clone(), root }, tensor, Location::caller())
    }

    /// Sends `tensors[r]` to every rank `r` and returns the tensors received, one per rank.
    ///
    /// `expected[r]` is the type and shape of what rank `r` sends here; it must match what that rank passes.
    ///
    /// ```
    /// # use shardwise::{launch, TensorMeta};
    /// # use shardwise::candle_core::{Device, DType, Tensor};
    /// launch(2, |world| {
    ///     // each rank sends r+1 elements to rank r
    ///     let pieces = [1, 2].map(|n| Tensor::full(world.rank() as i64, n, &Device::Cpu).unwrap());
    ///     let expected = vec![TensorMeta::new(world.rank() + 1, DType::I64); 2];
    ///     let got = world.all_to_all(&pieces, &expected)?;
    ///     assert_eq!(got[1].to_vec1::<i64>()?, vec![1; world.rank() + 1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[track_caller]
    pub fn all_to_all(&self, tensors: &[Tensor], expected: &[TensorMeta]) -> Result<Vec<Tensor>> {
        self.run_given(&Call::AllToAll { expected: expected.to_vec() }, tensors, Location::caller())
    }

    /// Changes the dimension on which a tensor is sharded over the group, from dimension `from` to dimension `to`.
    ///
    /// Before the call, ranks hold pieces of `from_sizes` along `from`; after it, pieces of `to_sizes` along `to`. One
    /// all-to-all.
    ///
    /// ```
    /// # use shardwise::launch;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(2, |world| {
    ///     let whole = Tensor::arange(0u32, 12, &Device::Cpu)?.reshape((3, 4))?;
    ///     let rows = whole.narrow(0, 2 * world.rank(), 2 - world.rank())?; // rows 2 + 1
    ///     let columns = world.exchange_dims(&rows, 0, &[2, 1], 1, &[3, 1])?; // columns 3 + 1
    ///     assert_eq!(columns.dims(), [3, [3, 1][world.rank()]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "shard_dim_alltoall")]
    #[track_caller]
    pub fn exchange_dims(
        &self,
        tensor: &Tensor,
        from: usize,
        from_sizes: &[usize],
        to: usize,
        to_sizes: &[usize],
    ) -> Result<Tensor> {
        let call = Call::ExchangeDims { from, from_sizes: from_sizes.into(), to, to_sizes: to_sizes.into() };
        self.single(&call, Some(tensor), Location::caller())
    }

    /// Sends a tensor to rank `to` of the group without waiting for the receiver.
    ///
    /// Point-to-point. Messages between two ranks with one tag arrive in the order in which they were sent. A message that
    /// is never received is [`Error::Unreceived`](crate::Error::Unreceived) at the end of the launch.
    #[doc(alias = "isend")]
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<()> {
        self.engine.send(tensor, to, tag, Location::caller())
    }

    /// Waits for the tensor that rank `from` of the group sends with the same tag.
    ///
    /// Point-to-point. `expected` is its type and shape; a different tensor is an error.
    #[track_caller]
    pub fn recv(&self, expected: &TensorMeta, from: usize, tag: u64) -> Result<Tensor> {
        let tensor = self.engine.recv(expected, from, tag, Location::caller())?;
        received(tensor, expected)
    }

    /// Makes tensors of this rank readable by every rank of the group.
    ///
    /// Collective; each rank passes any number of tensors. Reads are one-sided: the owner takes no part in them.
    ///
    /// ```
    /// # use shardwise::{launch, TensorMeta};
    /// # use shardwise::candle_core::{Device, DType, Tensor};
    /// launch(2, |world| {
    ///     let exposed = world.expose(&[Tensor::new(world.rank() as i64 + 7, &Device::Cpu)?])?;
    ///     if world.rank() == 0 {
    ///         let other = exposed.read(1, 0, &TensorMeta::new((), DType::I64), std::panic::Location::caller())?;
    ///         assert_eq!(other.to_scalar::<i64>()?, 8); // rank 1 may be anywhere, even at its end
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[track_caller]
    pub fn expose(&self, tensors: &[Tensor]) -> Result<Box<dyn ExposedTensors>> {
        self.expose_at(&self.given(&Call::Expose, tensors), Location::caller())
    }

    pub(crate) fn expose_at(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>> {
        Ok(Box::new(CheckedTensors(self.engine.expose(tensors, site)?)))
    }

    /// Splits the group into subgroups of ranks with the same `color`, each ordered by `key` and then by rank.
    ///
    /// A rank without a color is in no subgroup. Costs one small all-gather.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) in a dry run, where the colors of other ranks are unknown.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(4, |world| {
    ///     let parity = world.split(Some(world.rank() % 2), 0)?.expect("named a color");
    ///     assert_eq!(parity.ranks(), [world.rank() % 2, world.rank() % 2 + 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "split_group")]
    #[doc(alias = "MPI_Comm_split")]
    #[track_caller]
    pub fn split(&self, color: Option<usize>, key: i64) -> Result<Option<Group>> {
        if self.is_dry() {
            return Err(ErrorKind::NoData.error(
                "split",
                "a dry run, in which the colors of other ranks are unknown",
                "a run with all ranks",
                "name the ranks with subgroup, or use a mesh",
            ));
        }
        let mine = [i64::from(color.is_some()), color.unwrap_or(0) as i64, key];
        let call = Call::AllGather { dim: 0, sizes: std::iter::repeat_n(1, self.size()).collect() };
        let mine = Tensor::new(&[mine], &Device::Cpu)?;
        let all: Vec<Vec<i64>> = self.single(&call, Some(&mine), Location::caller())?.to_vec2()?;
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<usize> = (0..self.size()).filter(|&r| all[r][..2] == [1, color as i64]).collect();
        members.sort_by_key(|&r| (all[r][2], r));
        let ranks: Vec<usize> = members.iter().map(|&r| self.ranks()[r]).collect();
        self.subgroup(&ranks).map(Some)
    }

    /// Returns the group of some ranks of the world, given as global ranks in the order that the group is to have.
    ///
    /// Local: nothing is communicated. Unlike PyTorch's `new_group`, only members call it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a rank is listed twice or is none of the world, or if this rank is not
    /// listed.
    #[doc(alias = "new_group")]
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Group> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let repeated = sorted.windows(2).any(|pair| pair[0] == pair[1]);
        if repeated || !ranks.contains(&self.global_rank()) {
            return Err(ErrorKind::Mesh.error(
                "group",
                format!("ranks {ranks:?} asked for by rank {}", self.global_rank()),
                "distinct ranks with the asking rank among them",
                "only members of a group ask for it, and each rank is listed once",
            ));
        }
        self.engine.subgroup(ranks).map(Group::new)
    }

    /// Makes every pending and later collective of the world fail with `reason`, on all ranks. Local.
    pub fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    /// Whether this is a [dry run](crate::DryWorld), in which tensors have shapes but no data.
    pub fn is_dry(&self) -> bool {
        self.engine.is_dry()
    }

    /// Executes a call whose inputs the caller will not overwrite.
    pub(crate) fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        let enter = |context: &RankContext| context.group_axes.replace(self.axes.clone());
        let leave = |context: &RankContext, before| drop(context.group_axes.replace(before));
        let outputs = in_scope(enter, leave, || self.engine.run(call, inputs, user_site(site)))?;
        call.check_outputs(self.rank(), inputs, &outputs)?;
        Ok(outputs)
    }

    fn single(&self, call: &Call, input: Option<&Tensor>, site: Site) -> Result<Tensor> {
        let output = self.at_most_one(call, input, site)?;
        Ok(output.expect("every rank gets a tensor from this collective"))
    }

    fn at_most_one(&self, call: &Call, input: Option<&Tensor>, site: Site) -> Result<Option<Tensor>> {
        Ok(self.run_given(call, input.map_or(&[], std::slice::from_ref), site)?.pop())
    }

    /// Executes a call on tensors of the program, which may overwrite them as soon as the call returns.
    fn run_given(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        self.run(call, &self.given(call, inputs), site)
    }

    /// The program's tensors, copied if other ranks may read them after the call has returned. A tensor that cannot be
    /// copied is passed on, so that the engine rejects it on every rank.
    fn given<'a>(&self, call: &Call, inputs: &'a [Tensor]) -> Cow<'a, [Tensor]> {
        if !self.engine.shares_memory() || self.size() > 1 && call.has_second_phase(inputs) {
            return Cow::Borrowed(inputs);
        }
        let copy = |t: &Tensor| check_stored(t).and_then(|()| own_copy(t)).unwrap_or_else(|_| t.clone());
        inputs.iter().map(copy).collect::<Vec<_>>().into()
    }

    /// Whether ranks of this group may share the memory of a result.
    pub(crate) fn shares_memory(&self) -> bool {
        self.engine.shares_memory()
    }
}

/// Checks that a tensor from an engine has the expected type and shape.
fn received(tensor: Tensor, expected: &TensorMeta) -> Result<Tensor> {
    Call::Broadcast { whole: expected.clone(), root: 0 }.check_outputs(0, &[], std::slice::from_ref(&tensor))?;
    Ok(tensor)
}

/// Checks type and shape of every read, whichever engine provides it.
struct CheckedTensors(Box<dyn ExposedTensors>);

impl ExposedTensors for CheckedTensors {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        received(self.0.read(rank, index, expected, site)?, expected)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {:?})", self.rank(), self.ranks())
    }
}
