//! Loading: each rank reads the bytes that its layout needs, or replicas share their reads.

use std::panic::Location;
use std::path::Path;
use std::time::Duration;

use super::catalog::Catalog;
use super::files::LoadReport;
use super::load_options::{LoadedState, StateLoadOptions};
use super::open::open;
use super::read_tensor::{read_box, read_tensor};
use super::shared_reads::{ReceivedBoxes, SharedReads};
use super::state::State;
use super::template::{BoxReader, boxes_to_read, load_template};
use super::value::Key;
use crate::comm::{DeviceMesh, World, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
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
/// has a checksum is verified; [`load_reporting`] returns what has none.
///
/// # Errors
/// [`Error::OnRank`] on all ranks with the error of the first rank that failed: entries that are missing or have another shape,
/// an empty map in the template where the checkpoint has entries (they would be dropped silently), a checksum that does not
/// match, a file that cannot be read.
#[track_caller]
pub fn load(world: &World, path: impl AsRef<Path>, template: &State) -> Result<State> {
    load_at(world, path.as_ref(), template, &StateLoadOptions::default(), Location::caller()).map(|loaded| loaded.state)
}

/// Loads as [`load`] does, and also returns how much this rank read and what of it no checksum covers.
///
/// Collective.
#[track_caller]
pub fn load_reporting(world: &World, path: impl AsRef<Path>, template: &State) -> Result<(State, LoadReport)> {
    let loaded = load_at(world, path.as_ref(), template, &StateLoadOptions::default(), Location::caller())?;
    Ok((loaded.state, loaded.report))
}

/// Loads as [`load`] does, with options, and returns which entries differ between checkpoint and template.
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
/// As [`load`], for what the options do not allow.
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
pub(super) fn load_by_template(
    world: &World,
    path: &Path,
    options: &StateLoadOptions,
    (template, check): (&TemplateFn<'_>, &CheckState<'_>),
    site: Site,
) -> Result<LoadedState> {
    let attempt = |catalog: &Catalog| {
        let mut received = ReceivedBoxes::new();
        if options.share_reads && world.size() > 1 {
            let requests = template(catalog).and_then(|template| boxes_to_read(catalog, &template, options));
            let Some(requests) = settle_at(SHARING, world, catalog, requests, site)? else { return Ok(None) };
            let shared = SharedReads::plan(world, requests, site)?;
            let own = shared.read(world.rank(), &|request| BoxReader::new(catalog, options, &received).read(request));
            // Before anything is sent, so that no rank waits for one that could not read.
            let Some(own) = settle_at(SHARING, world, catalog, own, site)? else { return Ok(None) };
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

/// Loads all entries of a checkpoint, each tensor in the layout that `place` chooses from its flat key and global shape.
///
/// Collective: every rank of the world must call it, with the same choices. Needs no template; otherwise as [`load`].
///
/// # Errors
/// As [`load`]; [`ErrorKind::Layout`] if a chosen layout is for another shape.
#[track_caller]
pub fn load_placed(
    world: &World,
    path: impl AsRef<Path>,
    place: impl Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)>,
) -> Result<State> {
    load_selected_at(world, path.as_ref(), &|_| true, &place, Location::caller())
}

/// Loads the entries of a checkpoint whose flat key `select` accepts, such as `|key| key.starts_with("optimizer.state.")`, as
/// [`load_placed`] does.
///
/// Collective.
///
/// # Errors
/// As [`load_placed`].
#[track_caller]
pub fn load_selected(
    world: &World,
    path: impl AsRef<Path>,
    select: impl Fn(&str) -> bool,
    place: impl Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)>,
) -> Result<State> {
    load_selected_at(world, path.as_ref(), &select, &place, Location::caller())
}

/// Chooses mesh and layout of a tensor from its flat key and global shape.
type PlaceTensor<'a> = dyn Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)> + 'a;

fn load_selected_at(
    world: &World,
    path: &Path,
    select: &dyn Fn(&str) -> bool,
    place: &PlaceTensor<'_>,
    site: Site,
) -> Result<State> {
    let read = |catalog: &Catalog| -> Result<State> {
        let path_of = |key: &String| catalog.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
        let mut leaves = Vec::new();
        for (key, stored) in catalog.tensors.iter().filter(|(key, _)| select(key)) {
            let (mesh, layout) = place(key, &stored.shape)?;
            if layout.shape() != stored.shape {
                let needed = format!("one of shape {:?}, which tensor {key:?} has", stored.shape);
                return Err(ErrorKind::Layout.error(
                    "layout",
                    layout,
                    needed,
                    "build the layout from the shape that the function is given",
                ));
            }
            let dtype = stored.element.widened()?;
            let read = |part: &TensorBox| read_box(&catalog.files, key, stored, part, dtype);
            let tensor = read_tensor(&read, &mesh, layout.reduced(), dtype)?;
            leaves.push((path_of(key), State::Tensor(tensor)));
        }
        let values = catalog.values.iter().filter(|(key, _)| select(key));
        leaves.extend(values.map(|(key, value)| (path_of(key), State::Value(value.clone()))));
        Ok(State::unflatten(leaves))
    };
    load_consistent(world, path, site, &read).map(|(state, _)| state)
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
    settle_at(DONE, world, catalog, read, site)
}

/// [`settle`] at a stage of the load: ranks that are at different ones were called with different options.
fn settle_at<T>(stage: &str, world: &World, catalog: &Catalog, read: Result<T>, site: Site) -> Result<Option<T>> {
    let status = match &read {
        Ok(_) => stage.to_string(),
        Err(_) if catalog.files.is_replaced() => REPLACED.to_string(),
        Err(error) => format!("!{}", error.to_report()),
    };
    // The stage for success, `REPLACED`, or `!` and the error: one gather shows every rank how it went.
    let all = gather_texts(world, &status, site)?;
    if let Some(rank) = all.iter().position(|status| status.starts_with('!')) {
        return Err(Error::from_report(world.ranks()[rank], &all[rank][1..]));
    }
    if all.iter().any(|status| status == REPLACED) {
        return Ok(None);
    }
    if all.iter().any(|status| status != stage) {
        let (found, needed) = ("ranks that share reads and ranks that do not", "the same option on all ranks");
        return Err(ErrorKind::Argument.error("share_reads", found, needed, "pass the same options on every rank"));
    }
    read.map(Some)
}

/// The message of a rank that has loaded all.
const DONE: &str = "";
/// The message of a rank that will share reads, or has read what it passes on.
const SHARING: &str = "+";

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
