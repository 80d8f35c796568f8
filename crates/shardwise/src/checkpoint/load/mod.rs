//! Loading: each rank reads the bytes that its layout needs, or replicas share their reads.

pub(in crate::checkpoint) mod load_options;
pub(in crate::checkpoint) mod template;
pub(in crate::checkpoint) mod shared_reads;
pub(in crate::checkpoint) mod block_scales;
pub(in crate::checkpoint) mod mapped;
pub(in crate::checkpoint) mod dry_load;

use std::collections::BTreeMap;
use std::panic::Location;
use std::path::Path;
use std::time::Duration;

use crate::checkpoint::bytes::files::LoadReport;
use crate::checkpoint::bytes::read_tensor::{read_box, read_tensor};
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::load::load_options::{LoadedState, StateLoadOptions};
use crate::checkpoint::load::shared_reads::{ReceivedBoxes, SharedReads};
use crate::checkpoint::load::template::{BoxReader, boxes_to_read, load_template};
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::metadata::value::Key;
use crate::comm::{DeviceMesh, World, agree, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::fnv::fnv1a;
use crate::layout::{Layout, TensorBox};

/// Loads a checkpoint into new state with the structure of `template`, each tensor in the layout and dtype it has there.
///
/// Collective: every rank of the world must call it. Each rank reads only the bytes that its layouts need; ranks exchange
/// fingerprints and errors. The checkpoint may have been saved in any layout by any number of ranks. A `Partial` tensor of the
/// template is loaded replicated on that axis.
///
/// Unlike PyTorch's `load`, which fills the given state dict in place, this returns new state. Entries of the checkpoint that
/// the template lacks are ignored; entries that the checkpoint lacks are an error that lists all of them. Values are those of
/// the checkpoint, whatever the template has. A one-element tensor and a number stand for each other, because PyTorch stores
/// numbers such as `step` as tensors.
///
/// All ranks load the same save, even while another one replaces it: then they start over with the new one. Every byte that
/// has a checksum is verified; the report of [`load_with`] says what has none.
///
/// # Errors
/// [`Error::OnRank`] on all ranks with the error of the first rank that failed: entries that are missing or have another shape,
/// an empty map in the template where the checkpoint has entries (they would be dropped silently), a checksum that does not
/// match, a file that cannot be read.
#[track_caller]
pub fn load(world: &World, path: impl AsRef<Path>, template: &State) -> Result<State> {
    load_at(world, path.as_ref(), template, &StateLoadOptions::default(), Location::caller()).map(|loaded| loaded.state)
}

/// Loads as [`load`] does, with options, and returns which entries differ between checkpoint and template, how much this rank read,
/// and what of it no checksum covers.
///
/// Collective: every rank of the world must call it with the same options.
///
/// ```
/// use shardwise::checkpoint::{self, StateLoadOptions, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-load-with-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     checkpoint::save(&world, &path, &State::map([("step", 3), ("epoch", 1)]))?;
///     let options = StateLoadOptions { allow_partial: true, ..StateLoadOptions::default() };
///     let loaded = checkpoint::load_with(&world, &path, &State::map([("step", 0), ("best", 7)]), &options)?;
///     assert_eq!((loaded.missing_keys, loaded.unexpected_keys), (vec!["best".into()], vec!["epoch".into()]));
///     assert_eq!((loaded.state.value("step")?, loaded.state.value("best")?), (3.into(), 7.into()));
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// As [`load`], for what the options do not allow; [`ErrorKind::Disagreement`] on all ranks, before anything is read, if they pass
/// different options.
#[track_caller]
pub fn load_with(
    world: &World,
    path: impl AsRef<Path>,
    template: &State,
    options: &StateLoadOptions,
) -> Result<LoadedState> {
    load_at(world, path.as_ref(), template, options, Location::caller())
}

fn load_at(
    world: &World,
    path: &Path,
    template: &State,
    options: &StateLoadOptions,
    site: Site,
) -> Result<LoadedState> {
    load_by_template(world, path, options, (&|_| Ok(template.clone()), &|_| Ok(())), site)
}

/// Returns the template for an opened checkpoint. Must not communicate.
type TemplateFn<'a> = dyn Fn(&Catalog) -> Result<State> + 'a;
/// Refuses loaded state. Must not communicate.
type CheckState<'a> = dyn Fn(&State) -> Result<()> + 'a;

/// Loads state with the structure of a template that may depend on the checkpoint, and checks it on all ranks.
pub(in crate::checkpoint) fn load_by_template(
    world: &World,
    path: &Path,
    options: &StateLoadOptions,
    (template, check): (&TemplateFn<'_>, &CheckState<'_>),
    site: Site,
) -> Result<LoadedState> {
    // Before anything is read: ranks that share reads would wait for ranks that do not, or send them other elements.
    agree(world, &[("load options", &options.to_string())], site)?;
    let attempt = |catalog: &Catalog| {
        let mut received = ReceivedBoxes::new();
        if options.share_reads && world.size() > 1 {
            let requests = template(catalog).and_then(|template| boxes_to_read(catalog, &template, options));
            let Some(requests) = settle(world, catalog, requests, site)? else { return Ok(None) };
            let shared = SharedReads::plan(world, requests, site)?;
            let own = shared.read(world.rank(), &|request| BoxReader::new(catalog, options, &received).read(request));
            // Before anything is sent, so that no rank waits for one that could not read.
            let Some(own) = settle(world, catalog, own, site)? else { return Ok(None) };
            received = shared.exchange(world, &own)?;
        }
        let loaded = template(catalog).and_then(|template| {
            let loaded = load_template(catalog, &template, options, &received)?;
            check(&loaded.state)?;
            Ok(loaded)
        });
        settle(world, catalog, loaded, site)
    };
    let (loaded, report) = attempt_loads(world, path, site, &attempt)?;
    Ok(LoadedState { report, ..loaded })
}

/// Loads the entries of a checkpoint whose flat key `select` accepts (`|_| true`: all), each tensor in the layout that `place`
/// chooses from its flat key and global shape.
///
/// Collective: every rank of the world must call it, with the same choices, which ranks compare before anything is read. Needs no
/// template; otherwise as [`load`].
///
/// ```
/// use shardwise::checkpoint::{self, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-load-placed-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let weights = State::map([("w", DTensor::ones(4, DType::F32, &mesh, [Replicate])?)]);
///     checkpoint::save(&world, &path, &State::map([("model", weights.clone()), ("average", weights)]))?;
///     let in_shards = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(0)])?));
///     let model = checkpoint::load_placed(&world, &path, |key| key.starts_with("model."), in_shards)?;
///     assert_eq!(model.tensor("model.w")?.local_shape(), [2]);
///     assert!(model.get("average").is_none());
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// As [`load`]. On all ranks: [`ErrorKind::Layout`] if a chosen layout is for another shape or another mesh than the chosen one;
/// [`ErrorKind::Disagreement`], with the first entry that differs, if ranks choose different layouts or entries.
#[track_caller]
pub fn load_placed(
    world: &World,
    path: impl AsRef<Path>,
    select: impl Fn(&str) -> bool,
    place: impl Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)>,
) -> Result<State> {
    load_placed_at(world, path.as_ref(), &select, &place, Location::caller())
}

/// Chooses mesh and layout of a tensor from its flat key and global shape.
type PlaceTensor<'a> = dyn Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)> + 'a;

fn load_placed_at(
    world: &World,
    path: &Path,
    select: &dyn Fn(&str) -> bool,
    place: &PlaceTensor<'_>,
    site: Site,
) -> Result<State> {
    let attempt = |catalog: &Catalog| {
        let Some(chosen) = settle(world, catalog, choose_layouts(catalog, select, place), site)? else {
            return Ok(None);
        };
        agree_on_choices(world, &chosen, site)?;
        settle(world, catalog, read_chosen(catalog, &chosen), site)
    };
    attempt_loads(world, path, site, &attempt).map(|(state, _)| state)
}

/// The entries to load, by key: a mesh and a layout for a tensor, `None` for a value.
type ChosenLayouts<'a> = BTreeMap<&'a str, Option<(DeviceMesh, Layout)>>;

fn choose_layouts<'a>(
    catalog: &'a Catalog,
    select: &dyn Fn(&str) -> bool,
    place: &PlaceTensor<'_>,
) -> Result<ChosenLayouts<'a>> {
    let mut chosen: ChosenLayouts<'a> =
        catalog.values.keys().filter(|key| select(key)).map(|key| (key.as_str(), None)).collect();
    for (key, stored) in catalog.tensors.iter().filter(|(key, _)| select(key)) {
        let (mesh, layout) = place(key, &stored.shape)?;
        let needed = match layout.shape() == stored.shape {
            false => format!("one of shape {:?}, which tensor {key:?} has", stored.shape),
            true if layout.mesh() != mesh.mesh() => format!("one on {}, the mesh of tensor {key:?}", mesh.mesh()),
            true => {
                chosen.insert(key, Some((mesh, layout)));
                continue;
            }
        };
        let fix =
            "build the layout from the mesh that is returned with it and from the shape that the function is given";
        return Err(ErrorKind::Layout.error("layout", layout, needed, fix));
    }
    Ok(chosen)
}

/// Fails on all ranks if two of them chose different layouts for one entry: elements of it would be loaded twice or not at all, and
/// its next collective would fail. Communicates one hash; the choices themselves only if they differ.
fn agree_on_choices(world: &World, chosen: &ChosenLayouts<'_>, site: Site) -> Result<()> {
    // Debug escapes line breaks and tabs of a key.
    let line = |(key, choice): (&&str, &Option<(DeviceMesh, Layout)>)| match choice {
        Some((_, layout)) => format!("{key:?}\t{layout}"),
        None => format!("{key:?}\ta value"),
    };
    let mine = chosen.iter().map(line).collect::<Vec<_>>().join("\n");
    let hashes = gather_texts(world, &format!("{:016x}", fnv1a(mine.as_bytes())), site)?;
    if hashes.iter().all(|hash| *hash == hashes[0]) {
        return Ok(());
    }
    // Ranks may select entries that other ranks do not.
    let texts = gather_texts(world, &mine, site)?;
    let mut first: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for (rank, text) in texts.iter().enumerate() {
        for (key, layout) in text.lines().filter_map(|line| line.split_once('\t')) {
            let (other, found) = *first.entry(key).or_insert((rank, layout));
            if found != layout {
                let (a, b) = (world.ranks()[other], world.ranks()[rank]);
                return Err(ErrorKind::Disagreement.error(
                    "layout to load",
                    format!("{found} on rank {a} and {layout} on rank {b} for entry {key}"),
                    "the same on all ranks",
                    "choose it only from the key and the shape",
                ));
            }
        }
    }
    Ok(())
}

/// Reads this rank's parts. Must not communicate.
fn read_chosen(catalog: &Catalog, chosen: &ChosenLayouts<'_>) -> Result<State> {
    let mut leaves = Vec::new();
    for (&key, choice) in chosen {
        let path = catalog.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.to_string())]);
        let state = match choice {
            None => State::Value(catalog.values[key].clone()),
            Some((mesh, layout)) => {
                let stored = &catalog.tensors[key];
                let dtype = stored.element.widened()?;
                let read = |part: &TensorBox| read_box(&catalog.files, key, stored, part, dtype);
                State::Tensor(read_tensor(&read, mesh, layout.reduced(), dtype)?)
            }
        };
        leaves.push((path, state));
    }
    Ok(State::unflatten(leaves))
}

/// How often a load starts over because a save replaced the checkpoint: saves take longer than opening one, so only a
/// directory that changes all the time gets there.
const ATTEMPTS: u32 = 200;

/// Runs `read` on the same save on all ranks: if a newer save removed files meanwhile, all ranks open that one and read again.
/// `read` must not communicate, since it may fail on some ranks only.
pub(crate) fn load_consistent<T>(
    world: &World,
    path: &Path,
    site: Site,
    read: &dyn Fn(&Catalog) -> Result<T>,
) -> Result<(T, LoadReport)> {
    attempt_loads(world, path, site, &|catalog| settle(world, catalog, read(catalog), site))
}

/// Opens the same save on all ranks and runs `attempt` on it, until it returns something. `attempt` is collective: on all ranks
/// it fails, returns `None` because a newer save replaced the one that it read, or returns a value.
fn attempt_loads<T>(
    world: &World,
    path: &Path,
    site: Site,
    attempt: &dyn Fn(&Catalog) -> Result<Option<T>>,
) -> Result<(T, LoadReport)> {
    for _ in 0..ATTEMPTS {
        let catalog = open_on_all_ranks(world, path, site)?;
        if let Some(loaded) = attempt(&catalog)? {
            return Ok((loaded, catalog.files.report()));
        }
    }
    let found = format!("a save that replaced {} {ATTEMPTS} times while it was read", path.display());
    Err(ErrorKind::path(path).error(
        "checkpoint",
        found,
        "a checkpoint that stays until it is read",
        "load it while nothing is being saved",
    ))
}

/// Returns what this rank has read if all ranks could read; `None` if a newer save replaced the checkpoint on some of them;
/// else the error of the first rank that failed. Collective.
fn settle<T>(world: &World, catalog: &Catalog, read: Result<T>, site: Site) -> Result<Option<T>> {
    let status = match &read {
        Ok(_) => String::new(),
        Err(_) if catalog.files.is_replaced() => REPLACED.to_string(),
        Err(error) => format!("!{}", error.to_report()),
    };
    // Nothing for success, `REPLACED`, or `!` and the error: one gather shows every rank how it went.
    let all = gather_texts(world, &status, site)?;
    if let Some(rank) = all.iter().position(|status| status.starts_with('!')) {
        return Err(Error::from_report(world.ranks()[rank], &all[rank][1..]));
    }
    if all.iter().any(|status| status == REPLACED) {
        return Ok(None);
    }
    read.map(Some)
}

/// The message of a rank whose checkpoint was replaced while it was reading.
const REPLACED: &str = "~";

/// Opens a checkpoint on all ranks and ensures that all of them opened the same save.
fn open_on_all_ranks(world: &World, path: &Path, site: Site) -> Result<Catalog> {
    if world.is_dry() {
        return Err(ErrorKind::NoData.error(
            "load",
            "a dry run",
            "a run with data",
            "dry runs know shapes, not values",
        ));
    }
    let mut before = None;
    for attempt in 0..ATTEMPTS {
        let catalog = all_ok(world, open(path).and_then(|c| Ok((c.fingerprint()?, c))), site);
        let (fingerprint, catalog) = catalog?;
        if world.size() == 1 {
            return Ok(catalog);
        }
        let instance = catalog.files.instance();
        let all =
            gather_texts(world, &format!("{fingerprint:016x} {instance:016x} {}", before == Some(instance)), site)?;
        let field = |i: usize| all.iter().map(move |text| text.split(' ').nth(i));
        let same = |i: usize| field(i).all(|text| text == all[0].split(' ').nth(i));
        // Hosts may have a copy each. Then the contents are equal, the files differ, and they stay as they are.
        let is_unchanged = field(2).all(|stable| stable == Some("true"));
        if same(0) && (same(1) || is_unchanged) {
            return Ok(catalog);
        }
        if is_unchanged && attempt > MAX_STABLE_ATTEMPTS {
            let other = field(0).position(|text| text != all[0].split(' ').next()).unwrap_or(0);
            let found =
                format!("different contents on rank {} than on rank {}", world.ranks()[other], world.ranks()[0]);
            let found = format!("{found} at {}", path.display());
            return Err(ErrorKind::Disagreement.error(
                "checkpoint",
                found,
                "the same on all ranks",
                "copy one of them to all hosts",
            ));
        }
        before = Some(instance);
        std::thread::sleep(Duration::from_millis(1));
    }
    let found = format!("a save that replaced {} {ATTEMPTS} times while ranks opened it", path.display());
    Err(ErrorKind::Disagreement.error(
        "checkpoint",
        found,
        "one that all ranks can open",
        "load it while nothing is being saved",
    ))
}

/// After this many attempts with unchanged files on every rank, contents that differ are not a save that reaches some hosts
/// later (attempts are 1 ms apart) but different checkpoints.
const MAX_STABLE_ATTEMPTS: u32 = 20;
