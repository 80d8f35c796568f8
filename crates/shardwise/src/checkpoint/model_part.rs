//! A module as a part of a checkpoint, with options for its names.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::catalog::Catalog;
use super::parts::{Restore, Stateful};
use super::state::State;
use crate::error::{ErrorKind, Result};
use crate::nn::{IncompatibleKeys, Module, StateDictOptions};

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
    /// The names that did not match, found while the template was built.
    compared: RefCell<IncompatibleKeys>,
    loaded: IncompatibleKeys,
}

impl<'a, M: Module + ?Sized> ModelPart<'a, M> {
    /// Wraps a module with options.
    pub fn new(module: &'a M, options: StateDictOptions) -> Self {
        ModelPart { module, options, compared: RefCell::default(), loaded: IncompatibleKeys::default() }
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
        Ok(State::from(self.module.state_dict_with(&self.options)))
    }
}

impl<M: Module + ?Sized> Restore for ModelPart<'_, M> {
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        let below = format!("{entry}.");
        let names = stored.tensors.keys().filter_map(|key| key.strip_prefix(&below));
        let names: Vec<&str> = names.filter(|name| !name.ends_with("num_batches_tracked")).collect();
        let mut state = self.module.state_dict();
        let own: Vec<&String> = state.keys().collect();
        let loaded = self.options.compare(&own, names)?;
        state.retain(|name, _| !loaded.missing_keys.contains(name));
        if state.is_empty() && !loaded.missing_keys.is_empty() {
            let found = format!("no entry of the module under {below}{}", self.options.prefix);
            let fix = "set the prefix, or name the entry with `checkpoint::named`";
            return Err(ErrorKind::Damaged.error("checkpoint", found, "at least one", fix));
        }
        *self.compared.borrow_mut() = loaded;
        Ok(State::map(state.into_iter().map(|(name, tensor)| (self.options.prefix.clone() + &name, tensor))))
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        let mut tensors = BTreeMap::new();
        if let State::Map(entries) = loaded {
            for name in entries.keys() {
                tensors.insert(name.clone(), loaded.tensor(name)?.clone());
            }
        }
        let partial = StateDictOptions { partial: true, ..self.options.clone() };
        self.module.load_state_dict_with(&tensors, &partial)?;
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
