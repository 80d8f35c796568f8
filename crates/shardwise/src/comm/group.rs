//! Groups of ranks, as programs use them.

use std::borrow::Cow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::call::Call;
use super::{Communicator, Exposed};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::module_scope::user_site;
use crate::placement::ReduceOp;
use shardwise_kernels::{check_supported, own_copy};

/// Some ranks that make collectives together, seen from one of them.
///
/// All ranks of a group must make the same calls in the same order. Where they do not, every one of them gets an error
/// that names two ranks and the two places in the program; no call ever hangs. Sizes may differ between ranks and may
/// be zero. Results of reductions are combined in rank order: bitwise the same on every rank and in every run.
///
/// Ranks and roots in arguments count within the group. Collectives are made by the thread that runs the program of the
/// rank; those of another thread are refused on every rank, because ranks could not know whose calls belong together.
///
/// What a rank passed in it may overwrite as soon as the call returns: no rank reads it any more. Where threads would (small
/// tensors, `broadcast`, `all_to_all`, `send`, `expose`) it is copied. A result is cut off from any graph of candle's own
/// gradients. Ranks that are threads of one process may hold a large result in one memory: `copy()` it before writing into it
/// with `slice_set`. On one rank, or as the root of a broadcast between processes, a result may be the very tensor passed in,
/// unless that is a variable (`candle_core::Var`).
///
/// ```
/// # use shardwise::{launch, ReduceOp};
/// use candle_core::{Device, Tensor};
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
}

impl Group {
    /// Wraps an engine's end of a group.
    pub fn new(engine: Arc<dyn Communicator>) -> Self {
        Group { engine }
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.engine.ranks().len()
    }

    /// Global ranks of the group, in group order.
    pub fn ranks(&self) -> &[usize] {
        self.engine.ranks()
    }

    /// This rank's number in the world.
    pub fn global_rank(&self) -> usize {
        self.ranks()[self.rank()]
    }

    /// Waits until every rank is here.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(&Call::Barrier, &[], Location::caller()).map(drop)
    }

    /// An error on every rank unless all have the same numbers; `what` says in the error what they are.
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

    /// Every rank gets the reduction of all tensors, which have one shape.
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.single(&Call::AllReduce { op }, Some(tensor), Location::caller())
    }

    /// The root gets the reduction of all tensors, which have one shape.
    #[track_caller]
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Option<Tensor>> {
        self.at_most_one(&Call::Reduce { op, root }, Some(tensor), Location::caller())
    }

    /// Every rank gets all tensors joined along `dim` in rank order; `sizes` are their sizes along it.
    ///
    /// ```
    /// # use shardwise::launch;
    /// # use candle_core::{Device, Tensor};
    /// launch(3, |world| {
    ///     let mine = Tensor::full(world.rank() as u32, world.rank(), &Device::Cpu)?; // rank 0 holds nothing
    ///     let all = world.all_gather(&mine, 0, &[0, 1, 2])?;
    ///     assert_eq!(all.to_vec1::<u32>()?, [1, 2, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Tensor> {
        self.single(&Call::AllGather { dim, sizes: sizes.into() }, Some(tensor), Location::caller())
    }

    /// The root gets all tensors joined along `dim` in rank order; `sizes` are their sizes along it.
    #[track_caller]
    pub fn gather(&self, tensor: &Tensor, dim: usize, sizes: &[usize], root: usize) -> Result<Option<Tensor>> {
        self.at_most_one(&Call::Gather { dim, sizes: sizes.into(), root }, Some(tensor), Location::caller())
    }

    /// The tensors, which have one shape, are reduced and the result is cut along `dim` into pieces of `sizes`; every
    /// rank gets its piece.
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp, dim: usize, sizes: &[usize]) -> Result<Tensor> {
        self.single(&Call::ReduceScatter { op, dim, sizes: sizes.into() }, Some(tensor), Location::caller())
    }

    /// The root's tensor, described by `whole`, is cut along `dim` into pieces of `sizes`; every rank gets its piece.
    /// The root passes the tensor, every other rank `None`.
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

    /// Every rank gets the root's tensor, described by `whole`. The root passes the tensor, every other rank `None`.
    #[track_caller]
    pub fn broadcast(&self, tensor: Option<&Tensor>, whole: &TensorMeta, root: usize) -> Result<Tensor> {
        self.single(&Call::Broadcast { whole: whole.clone(), root }, tensor, Location::caller())
    }

    /// Hands `tensors[r]` to every rank `r` and gets from every rank what is `expected` from it.
    ///
    /// ```
    /// # use shardwise::{launch, TensorMeta};
    /// # use candle_core::{Device, DType, Tensor};
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

    /// Changes the dimension along which a tensor is spread over the group: it is cut along `from` into pieces of
    /// `from_sizes`, of which this rank holds one; afterwards it is cut along `to` into pieces of `to_sizes`.
    ///
    /// ```
    /// # use shardwise::launch;
    /// # use candle_core::{Device, Tensor};
    /// launch(2, |world| {
    ///     let whole = Tensor::arange(0u32, 12, &Device::Cpu)?.reshape((3, 4))?;
    ///     let rows = whole.narrow(0, 2 * world.rank(), 2 - world.rank())?; // rows 2 + 1
    ///     let columns = world.exchange_dims(&rows, 0, &[2, 1], 1, &[3, 1])?; // columns 3 + 1
    ///     assert_eq!(columns.dims(), [3, [3, 1][world.rank()]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
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

    /// Hands a tensor to rank `to` of the group, without waiting for it to be received. Messages between two ranks
    /// with one tag arrive in the order in which they were sent.
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<()> {
        self.engine.send(tensor, to, tag, Location::caller())
    }

    /// Waits for the tensor that rank `from` of the group sends with the same tag.
    #[track_caller]
    pub fn recv(&self, expected: &TensorMeta, from: usize, tag: u64) -> Result<Tensor> {
        let tensor = self.engine.recv(expected, from, tag, Location::caller())?;
        received(tensor, expected)
    }

    /// Lets every rank of the group read these tensors of this one from now on, without its help. All ranks of the group
    /// make the call, each with any number of tensors.
    ///
    /// ```
    /// # use shardwise::{launch, TensorMeta};
    /// # use candle_core::{Device, DType, Tensor};
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
    pub fn expose(&self, tensors: &[Tensor]) -> Result<Box<dyn Exposed>> {
        self.expose_at(&self.given(&Call::Expose, tensors), Location::caller())
    }

    pub(crate) fn expose_at(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn Exposed>> {
        Ok(Box::new(Checked(self.engine.expose(tensors, site)?)))
    }

    /// Cuts the group into groups: ranks that name the same `color` end up together, ordered by `key` and then by
    /// rank. A rank that names no color gets none.
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

    /// The group of some ranks of this world, given as global ranks in the order that the group shall have; this rank
    /// must be one of them. Nothing is communicated: every member asks for the same group by itself.
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

    /// Brings every pending and later collective of the world to an error that carries `reason`, on all ranks.
    pub fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    /// Whether this is a dry run: tensors are placeholders without data.
    pub fn is_dry(&self) -> bool {
        self.engine.is_dry()
    }

    /// Carries out a call that is put together elsewhere.
    pub(crate) fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        let outputs = self.engine.run(call, inputs, user_site(site))?;
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

    /// Carries out a call on tensors of the program, which it may change in place as soon as it has the result.
    fn run_given(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        self.run(call, &self.given(call, inputs), site)
    }

    /// A program's tensors as something that other ranks can read: copied, unless the engine has no use for them after
    /// the call. What cannot be copied is passed on, for the engine to refuse on every rank.
    fn given<'a>(&self, call: &Call, inputs: &'a [Tensor]) -> Cow<'a, [Tensor]> {
        if !self.engine.shares_memory() || self.size() > 1 && call.ends_with_reads(inputs) {
            return Cow::Borrowed(inputs);
        }
        let copy = |t: &Tensor| check_supported(t).and_then(|()| own_copy(t)).unwrap_or_else(|_| t.clone());
        inputs.iter().map(copy).collect::<Vec<_>>().into()
    }

    /// Whether ranks of this group may hold one memory.
    pub(crate) fn shares_memory(&self) -> bool {
        self.engine.shares_memory()
    }
}

/// A tensor that an engine received, if it is what was expected.
fn received(tensor: Tensor, expected: &TensorMeta) -> Result<Tensor> {
    Call::Broadcast { whole: expected.clone(), root: 0 }.check_outputs(0, &[], std::slice::from_ref(&tensor))?;
    Ok(tensor)
}

/// Tensors of other ranks, compared with what is expected of them whoever provides them.
struct Checked(Box<dyn Exposed>);

impl Exposed for Checked {
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor> {
        received(self.0.read(rank, index, expected, site)?, expected)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {:?})", self.rank(), self.ranks())
    }
}
