//! `Algorithm`, any optimizer as one type, and the list of built-in optimizers.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value as Json;

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::{Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, Lion, Muon, NAdam, RAdam, RmsProp, Sgd};
use crate::error::{Error, ErrorKind, Result};

/// The list of built-in optimizers, by name.
macro_rules! built_in {
    ($($Optimizer:ident),* $(,)?) => {
        /// Names of the built-in optimizers.
        pub(super) const NAMES: &[&str] = &[$($Optimizer::NAME),*];

        fn built_in(name: &str) -> Option<Algorithm> {
            match name {
                $($Optimizer::NAME => Some($Optimizer::default().into()),)*
                _ => None,
            }
        }
    };
}
built_in!(Sgd, Adagrad, Adam, AdamW, RmsProp, Adadelta, Adamax, NAdam, RAdam, Asgd, Lion, Adafactor, Muon);

/// An [`Optimizer`] of any type, with its hyperparameters (type-erased).
///
/// ```
/// use shardwise::optim::{AdamW, Algorithm};
///
/// let algorithm = Algorithm::from(AdamW { weight_decay: 0.1, ..AdamW::default() });
/// assert_eq!(algorithm.name(), "adamw");
/// assert_eq!(algorithm.downcast_ref::<AdamW>().map(|settings| settings.weight_decay), Some(0.1));
/// assert_eq!(Algorithm::by_name("adamw")?.with_setting("weight_decay", 0.1)?, algorithm);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Clone)]
pub struct Algorithm(AlgorithmRepr);

/// Representation of an [`Algorithm`].
#[derive(Clone)]
enum AlgorithmRepr {
    Typed(Arc<dyn DynOptimizer>),
    /// Settings from a file of an optimizer whose type is not known here, as for custom optimizers. Loading them into an
    /// optimizer of the same name gives them its type.
    Untyped {
        name: String,
        settings: Json,
    },
}

/// Object-safe form of [`Optimizer`].
trait DynOptimizer: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn default_lr(&self) -> f64;
    fn state(&self, shape: &[usize]) -> Vec<StateTensor>;
    fn numbers(&self) -> &'static [(&'static str, f64)];
    fn check(&self) -> Result<()>;
    fn check_shape(&self, shape: &[usize]) -> Result<()>;
    fn step(&self, step: &mut ParamStep<'_>) -> Result<()>;
    fn settings(&self) -> serde_json::Result<Json>;
    /// Deserializes settings into the same type of optimizer.
    fn read(&self, settings: Json) -> serde_json::Result<Arc<dyn DynOptimizer>>;
    fn as_any(&self) -> &dyn Any;
}

impl<O: Optimizer> DynOptimizer for O {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn default_lr(&self) -> f64 {
        O::DEFAULT_LR
    }

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        O::state(self, shape)
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        O::numbers(self)
    }

    fn check(&self) -> Result<()> {
        O::check(self)
    }

    fn check_shape(&self, shape: &[usize]) -> Result<()> {
        O::check_shape(self, shape)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        O::step(self, step)
    }

    fn settings(&self) -> serde_json::Result<Json> {
        serde_json::to_value(self)
    }

    fn read(&self, settings: Json) -> serde_json::Result<Arc<dyn DynOptimizer>> {
        Ok(Arc::new(serde_json::from_value::<O>(settings)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<O: Optimizer> From<O> for Algorithm {
    fn from(optimizer: O) -> Self {
        Algorithm(AlgorithmRepr::Typed(Arc::new(optimizer)))
    }
}

impl Algorithm {
    /// Names of the built-in optimizers, which [`by_name`](Self::by_name) takes.
    pub fn names() -> &'static [&'static str] {
        NAMES
    }

    /// Returns a built-in optimizer by name, with default settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] with all names if there is none of this name.
    pub fn by_name(name: &str) -> Result<Algorithm> {
        built_in(name).ok_or_else(|| {
            let needed = format!("one of {}", NAMES.join(", "));
            ErrorKind::unknown(name).error("optimizer", format!("`{name}`"), needed, "correct the name")
        })
    }

    /// Name of the optimizer, such as `adamw`: that of its module in `torch.optim`.
    pub fn name(&self) -> &str {
        match &self.0 {
            AlgorithmRepr::Typed(optimizer) => optimizer.name(),
            AlgorithmRepr::Untyped { name, .. } => name,
        }
    }

    /// Default learning rate of the optimizer.
    pub fn default_lr(&self) -> f64 {
        self.typed().map_or(1e-3, DynOptimizer::default_lr)
    }

    /// Returns the optimizer if it is of this type.
    pub fn downcast_ref<O: Optimizer>(&self) -> Option<&O> {
        self.typed().ok()?.as_any().downcast_ref()
    }

    /// Returns the optimizer with one setting changed, by the name of its field.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such setting, or if it has another type.
    pub fn with_setting(&self, name: &str, value: impl Into<Json>) -> Result<Algorithm> {
        let mut settings = self.settings()?;
        let Some(setting) = settings.get_mut(name) else {
            let found = format!("`{name}` of {}", self.name());
            let known: Vec<&String> = settings.keys().collect();
            return Err(ErrorKind::Optimizer.error("setting", found, format!("one of {known:?}"), "correct the name"));
        };
        *setting = value.into();
        self.with_settings(settings)
    }

    /// State tensors for a parameter of a shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the settings were read from a file and have no type yet.
    pub fn state(&self, shape: &[usize]) -> Result<Vec<StateTensor>> {
        Ok(self.typed()?.state(shape))
    }

    /// Checks that parameters of this shape are supported.
    ///
    /// # Errors
    /// Those of [`Optimizer::check_shape`].
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        self.typed()?.check_shape(shape)
    }

    /// The settings by name; empty for an optimizer without named fields.
    pub(crate) fn settings(&self) -> Result<serde_json::Map<String, Json>> {
        match self.stored().map_err(Error::other)? {
            Json::Object(settings) => Ok(settings),
            _ => Ok(serde_json::Map::new()),
        }
    }

    /// The settings as they are serialized.
    fn stored(&self) -> serde_json::Result<Json> {
        match &self.0 {
            AlgorithmRepr::Typed(optimizer) => optimizer.settings(),
            AlgorithmRepr::Untyped { settings, .. } => Ok(settings.clone()),
        }
    }

    /// The optimizer with other settings.
    pub(crate) fn with_settings(&self, settings: serde_json::Map<String, Json>) -> Result<Algorithm> {
        // An optimizer without named fields keeps its settings.
        let settings = match settings.is_empty() {
            true => self.stored().map_err(Error::other)?,
            false => Json::Object(settings),
        };
        self.read(settings)
    }

    fn read(&self, settings: Json) -> Result<Algorithm> {
        let found = settings.to_string();
        let optimizer = self.typed()?.read(settings).map_err(|error| {
            let fix = "use settings that an optimizer of this version has stored";
            ErrorKind::Optimizer.error::<Error>(
                "optimizer settings",
                format!("{found} ({error})"),
                format!("settings of {}", self.name()),
                fix,
            )
        })?;
        Ok(Algorithm(AlgorithmRepr::Typed(optimizer)))
    }

    /// Gives settings that were read from a file the type of the optimizer of the same name that they are loaded into. The
    /// type may also differ because a custom optimizer has the name of a built-in one.
    pub(super) fn with_type_of(&self, own: &Algorithm) -> Result<Algorithm> {
        match (&self.0, &own.0) {
            (AlgorithmRepr::Typed(found), AlgorithmRepr::Typed(own))
                if found.as_any().type_id() == own.as_any().type_id() =>
            {
                Ok(self.clone())
            }
            _ => own.read(self.stored().map_err(Error::other)?),
        }
    }

    pub(super) fn numbers(&self) -> Result<&'static [(&'static str, f64)]> {
        Ok(self.typed()?.numbers())
    }

    pub(super) fn check(&self) -> Result<()> {
        self.typed()?.check()
    }

    pub(super) fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        self.typed()?.step(step)
    }

    fn typed(&self) -> Result<&dyn DynOptimizer> {
        match &self.0 {
            AlgorithmRepr::Typed(optimizer) => Ok(&**optimizer),
            AlgorithmRepr::Untyped { name, .. } => Err(ErrorKind::Optimizer.error(
                "optimizer",
                format!("settings of `{name}` from a file, which are not those of a built-in optimizer"),
                "an optimizer of a type",
                "load them into an optimizer of that type with `load_state_dict`",
            )),
        }
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            AlgorithmRepr::Typed(optimizer) => optimizer.fmt(f),
            AlgorithmRepr::Untyped { name, settings } => write!(f, "{name} {settings}"),
        }
    }
}

/// Equal names and equal settings.
impl PartialEq for Algorithm {
    fn eq(&self, other: &Self) -> bool {
        let settings = |algorithm: &Algorithm| algorithm.stored().ok();
        self.name() == other.name() && settings(self) == settings(other)
    }
}

/// Serialized as `{"adamw": {"betas": ...}}`.
impl Serialize for Algorithm {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::Error as _;
        let settings = self.stored().map_err(S::Error::custom)?;
        serializer.collect_map([(self.name(), settings)])
    }
}

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let named = serde_json::Map::deserialize(deserializer)?;
        let mut entries = named.into_iter();
        let (Some((name, settings)), None) = (entries.next(), entries.next()) else {
            return Err(D::Error::custom("an optimizer is stored as one name with its settings"));
        };
        // Earlier versions stored the names of types, such as AdamW. Settings that the built-in optimizer does not accept may
        // belong to a custom optimizer of the same name.
        let known = built_in(&name.to_lowercase()).and_then(|known| known.read(settings.clone()).ok());
        Ok(known.unwrap_or(Algorithm(AlgorithmRepr::Untyped { name, settings })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A custom optimizer with the name of a built-in one.
    #[derive(Debug, Serialize, Deserialize)]
    struct UserLion {
        speed: f64,
    }

    impl Optimizer for UserLion {
        const NAME: &'static str = "lion";

        fn state(&self, _: &[usize]) -> Vec<StateTensor> {
            Vec::new()
        }

        fn step(&self, _: &mut ParamStep<'_>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn stored_settings_get_the_type_that_they_are_loaded_into() {
        let stored = Algorithm::from(UserLion { speed: 2.0 });
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(text, r#"{"lion":{"speed":2.0}}"#);
        let read: Algorithm = serde_json::from_str(&text).unwrap();
        assert_eq!(read, stored);
        assert!(read.downcast_ref::<UserLion>().is_none());
        let message = read.check().unwrap_err().to_string();
        assert!(message.contains("settings of `lion` from a file"), "{message}");
        let bound = read.with_type_of(&Algorithm::from(UserLion { speed: 1.0 })).unwrap();
        assert_eq!(bound.downcast_ref::<UserLion>().map(|lion| lion.speed), Some(2.0));
        let message = read.with_type_of(&Lion::default().into()).unwrap_err().to_string();
        assert!(message.contains("settings of lion") && message.contains("speed"), "{message}");
        let typed = Algorithm::from(Lion::default());
        assert!(typed.with_type_of(&typed).unwrap().downcast_ref::<Lion>().is_some());
    }
}
