//! Which names a state may have when it is loaded into a module.

use std::collections::HashSet;

use crate::error::{ErrorKind, Result};

/// How names of a state are matched with those of a module.
///
/// ```
/// use shardwise::nn::{Linear, StateDictOptions};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Linear::new(&Builder::new(&mesh), 4, 6)?;
///     let in_ddp = StateDictOptions { prefix: "module.".into(), ..StateDictOptions::default() };
///     let mut state = model.state_dict_with(&in_ddp);
///     state.remove("module.bias");
///     let loaded = model.load_state_dict_with(&state, &StateDictOptions { strict: false, ..in_ddp })?;
///     assert_eq!((loaded.missing.len(), loaded.unexpected.len()), (1, 0));
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDictOptions {
    /// Whether it is an error if the state lacks names of the module or has names that the module lacks. Otherwise they are
    /// returned, and what the state lacks stays as it is.
    pub strict: bool,
    /// Whether the state may lack names of the module, which stay as they are, also if the load is strict.
    pub partial: bool,
    /// What names begin with outside of the module, such as `module.`: added when saved, stripped when loaded. Names that
    /// begin otherwise belong to others and are left alone.
    pub prefix: String,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        StateDictOptions { strict: true, partial: false, prefix: String::new() }
    }
}

/// Names that a load did not match, in order.
#[doc(alias = "IncompatibleKeys")]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Names of the module that the state lacks.
    #[doc(alias = "missing_keys")]
    pub missing: Vec<String>,
    /// Names of the state that the module lacks, without the prefix.
    #[doc(alias = "unexpected_keys")]
    pub unexpected: Vec<String>,
}

impl StateDictOptions {
    /// Compares names of a module with those of a state, which have the prefix.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with all names that do not match, of both kinds, if the options do not allow them.
    pub(crate) fn compare<'a>(
        &self,
        own: &[impl AsRef<str>],
        stored: impl IntoIterator<Item = &'a str>,
    ) -> Result<Loaded> {
        let stored: Vec<&str> = stored.into_iter().filter_map(|name| name.strip_prefix(&*self.prefix)).collect();
        let own: Vec<&str> = own.iter().map(AsRef::as_ref).collect();
        let lacking = |names: &[&str], others: &[&str]| -> Vec<String> {
            let others: HashSet<&str> = others.iter().copied().collect();
            names.iter().filter(|name| !others.contains(*name)).map(ToString::to_string).collect()
        };
        let loaded = Loaded { missing: lacking(&own, &stored), unexpected: lacking(&stored, &own) };
        let fits = (self.partial || loaded.missing.is_empty()) && loaded.unexpected.is_empty();
        if fits || !self.strict {
            return Ok(loaded);
        }
        let under = if self.prefix.is_empty() { String::new() } else { format!(" under the prefix {:?}", self.prefix) };
        let found = format!("missing {:?}, unexpected {:?}{under}", loaded.missing, loaded.unexpected);
        Err(ErrorKind::State { missing: loaded.missing, unexpected: loaded.unexpected }.error(
            "state",
            found,
            "the names of the module",
            "rename the entries, set a prefix, or load with `strict: false`",
        ))
    }
}
