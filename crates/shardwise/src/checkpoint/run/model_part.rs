//! A module as a part of a checkpoint, with options for its names.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::run::parts::{Restore, Stateful, module_entries, restore_extra_states, tensor_entries};
use crate::error::{ErrorKind, Result};
use crate::nn::{IncompatibleKeys, Module, StateDictOptions};

/// Returns the stored name of a name of a module.
type RenameFn<'a> = Box<dyn Fn(&str) -> String + 'a>;

/// A module that is saved and restored with [`StateDictOptions`]: a name prefix, and strict or non-strict matching.
///
/// Its entry is `model`. A strict load fails with one error that lists all missing and unexpected names; a non-strict one
/// returns them from [`loaded`](Self::loaded). Names without the prefix, and PyTorch's `num_batches_tracked`, are ignored.
///
/// ```
/// use shardwise::checkpoint::{self, ModelPart};
/// use shardwise::nn::{Linear, StateDictOptions};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-model-part-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let saved = Linear::without_bias(&Builder::new(&mesh), 4, 6)?;
///     let in_ddp = StateDictOptions { prefix: "module.".into(), ..StateDictOptions::default() };
///     checkpoint::save_from(&world, &path, (ModelPart::new(&saved, in_ddp.clone()),))?;
///     let model = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
///     let mut part = ModelPart::new(&model, StateDictOptions { strict: false, ..in_ddp });
///     checkpoint::load_into(&world, &path, (&mut part,))?;
///     assert_eq!(part.loaded().missing_keys, ["bias"]);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "get_model_state_dict")]
#[doc(alias = "set_model_state_dict")]
pub struct ModelPart<'a, M: ?Sized> {
    module: &'a M,
    options: StateDictOptions,
    /// The name in the checkpoint of a name of the module, without the prefix.
    rename: Option<RenameFn<'a>>,
    /// The names that did not match, found while the template was built.
    compared: RefCell<IncompatibleKeys>,
    loaded: IncompatibleKeys,
}

impl<'a, M: Module + ?Sized> ModelPart<'a, M> {
    /// Wraps a module with options.
    pub fn new(module: &'a M, options: StateDictOptions) -> Self {
        let (compared, loaded) = (RefCell::default(), IncompatibleKeys::default());
        ModelPart { module, options, rename: None, compared, loaded }
    }

    /// Gives the module's parameters and buffers other names in checkpoints, in both directions: `rename` returns the stored
    /// name of a name of the module, without the prefix.
    #[doc(alias = "register_state_dict_hook")]
    pub fn renamed(mut self, rename: impl Fn(&str) -> String + 'a) -> Self {
        self.rename = Some(Box::new(rename));
        self
    }

    /// The module's names by their stored ones, without the prefix.
    fn stored_names(&self) -> Result<BTreeMap<String, String>> {
        let mut names = BTreeMap::new();
        for own in self.module.state_dict().into_keys() {
            let stored = self.rename.as_ref().map_or_else(|| own.clone(), |rename| rename(&own));
            if let Some(other) = names.insert(stored.clone(), own.clone()) {
                let found = format!("{other:?} and {own:?}, which are both stored as {stored:?}");
                return Err(ErrorKind::Argument.error("names", found, "different names", "change the function"));
            }
        }
        Ok(names)
    }

    /// The names that did not match in the last load.
    pub fn loaded(&self) -> &IncompatibleKeys {
        &self.loaded
    }
}

impl<M: Module + ?Sized> Stateful for ModelPart<'_, M> {
    fn entry(&self) -> &str {
        "model"
    }

    fn state(&self) -> Result<State> {
        let mut entries = module_entries(self.module, &self.options.prefix);
        let prefix = &self.options.prefix;
        // Extra states keep their names: a rename is for parameters and buffers.
        let renamed: Vec<_> = self.stored_names()?.into_iter().filter(|(stored, own)| stored != own).collect();
        let moved: Vec<_> = renamed
            .into_iter()
            .filter_map(|(stored, own)| Some((format!("{prefix}{stored}"), entries.remove(&format!("{prefix}{own}"))?)))
            .collect();
        entries.extend(moved);
        Ok(State::Map(entries))
    }
}

impl<M: Module + ?Sized> Restore for ModelPart<'_, M> {
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        let below = format!("{entry}.");
        let names = stored.tensors.keys().filter_map(|key| key.strip_prefix(&below));
        let names: Vec<&str> = names.filter(|name| !name.ends_with("num_batches_tracked")).collect();
        let mut own_names = self.stored_names()?;
        let all: Vec<&String> = own_names.keys().collect();
        let mut loaded = self.options.compare(&all, names)?;
        let own = |name: &String| own_names.get(name).cloned().unwrap_or_else(|| name.clone());
        let missing = loaded.missing_keys.iter().map(own).collect();
        own_names.retain(|name, _| !loaded.missing_keys.contains(name));
        loaded.missing_keys = missing;
        let mut own = tensor_entries(self.module);
        let state: BTreeMap<String, State> =
            own_names.into_iter().filter_map(|(stored, name)| Some((stored, own.remove(&name)?))).collect();
        if state.is_empty() && !loaded.missing_keys.is_empty() {
            let found = format!("no entry of the module under {below}{}", self.options.prefix);
            let fix = "set the prefix, or name the entry with `checkpoint::named`";
            return Err(ErrorKind::Damaged.error("checkpoint", found, "at least one", fix));
        }
        *self.compared.borrow_mut() = loaded;
        let tensors = state.into_iter();
        // A checkpoint without an extra state of the module leaves it as it is.
        let is_stored = |name: &str| stored.value(&format!("{below}{}{name}", self.options.prefix)).is_ok();
        let extra = self.module.named_extra_states().into_iter().filter(|(name, _)| is_stored(name));
        let extra = extra.map(|(name, extra)| (name, State::from(extra.get())));
        Ok(State::map(tensors.chain(extra).map(|(name, entry)| (self.options.prefix.clone() + &name, entry))))
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        let (mut tensors, names) = (BTreeMap::new(), self.stored_names()?);
        if let State::Map(entries) = loaded {
            let extra = self.module.named_extra_states();
            let is_extra =
                |name: &str| extra.iter().any(|(path, _)| name.strip_prefix(&*self.options.prefix) == Some(path));
            for name in entries.keys().filter(|name| !is_extra(name)) {
                let stored = name.strip_prefix(&self.options.prefix).unwrap_or(name);
                let own = names.get(stored).map_or(stored, String::as_str);
                let stored = loaded.get(name).and_then(State::stored_tensor).map_or_else(|| loaded.tensor(name), Ok)?;
                tensors.insert(self.options.prefix.clone() + own, stored.clone());
            }
        }
        let partial = StateDictOptions { partial: true, ..self.options.clone() };
        self.module.load_state_dict_with(&tensors, &partial)?;
        restore_extra_states(self.module, loaded, &self.options.prefix)?;
        self.loaded = self.compared.take();
        Ok(())
    }
}

impl<M: Module + ?Sized> Stateful for &mut ModelPart<'_, M> {
    fn entry(&self) -> &str {
        (**self).entry()
    }

    fn state(&self) -> Result<State> {
        (**self).state()
    }
}

impl<M: Module + ?Sized> Restore for &mut ModelPart<'_, M> {
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        (**self).template(stored, entry)
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        (**self).restore(loaded)
    }
}
