//! Options of `load_state_dict`, and the names that did not match.

use std::collections::HashSet;

use crate::error::{ErrorKind, Result, listed};

/// How the names of a state dict are matched with those of a module.
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
///     assert_eq!((loaded.missing_keys.len(), loaded.unexpected_keys.len()), (1, 0));
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDictOptions {
    /// Whether missing and unexpected names are an error; true by default. Otherwise they are returned as
    /// [`IncompatibleKeys`], and parameters that the state dict lacks keep their values.
    pub strict: bool,
    /// Whether the state dict may lack names of the module even if the load is strict; false by default.
    pub partial: bool,
    /// Prefix of the names outside of the module, such as `module.`: added when saved, stripped when loaded. Names without it
    /// are ignored.
    pub prefix: String,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        StateDictOptions { strict: true, partial: false, prefix: String::new() }
    }
}

/// Names that a load did not match, in order.
#[doc(alias = "_IncompatibleKeys")]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names of the module that the state dict lacks.
    pub missing_keys: Vec<String>,
    /// Names of the state dict that the module lacks, without the prefix.
    pub unexpected_keys: Vec<String>,
}

impl StateDictOptions {
    /// Compares the names of a module with those of a state dict, which have the prefix.
    ///
    /// # Errors
    /// [`ErrorKind::State`] with all names that do not match, of both kinds, if the options do not allow them; its text has ten of
    /// each.
    pub(crate) fn compare<'a>(
        &self,
        own: &[impl AsRef<str>],
        stored: impl IntoIterator<Item = &'a str>,
    ) -> Result<IncompatibleKeys> {
        let stored: Vec<&str> = stored.into_iter().filter_map(|name| name.strip_prefix(&*self.prefix)).collect();
        let own: Vec<&str> = own.iter().map(AsRef::as_ref).collect();
        let lacking = |names: &[&str], others: &[&str]| -> Vec<String> {
            let others: HashSet<&str> = others.iter().copied().collect();
            names.iter().filter(|name| !others.contains(*name)).map(ToString::to_string).collect()
        };
        let loaded = IncompatibleKeys { missing_keys: lacking(&own, &stored), unexpected_keys: lacking(&stored, &own) };
        let fits = (self.partial || loaded.missing_keys.is_empty()) && loaded.unexpected_keys.is_empty();
        if fits || !self.strict {
            return Ok(loaded);
        }
        let under = if self.prefix.is_empty() { String::new() } else { format!(" under the prefix {:?}", self.prefix) };
        let quoted = |names: &[String]| listed(names.iter().map(|name| format!("{name:?}")));
        let (missing, unexpected) = (quoted(&loaded.missing_keys), quoted(&loaded.unexpected_keys));
        let found = format!("missing [{missing}], unexpected [{unexpected}]{under}");
        Err(ErrorKind::State { missing: loaded.missing_keys, unexpected: loaded.unexpected_keys }.error(
            "state",
            found,
            "the names of the module",
            "rename the entries, set a prefix, or load with `strict: false`",
        ))
    }
}
