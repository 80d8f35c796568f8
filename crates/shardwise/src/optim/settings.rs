//! Declaring and checking the settings of optimizers.

use crate::error::{ErrorKind, Result};

/// Declares the settings of an optimizer with their defaults.
macro_rules! settings {
    ($(#[$about:meta])* $Name:ident { $($(#[$what:meta])* $field:ident: $T:ty = $default:expr,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct $Name {
            $($(#[$what])* pub $field: $T,)*
        }

        impl Default for $Name {
            fn default() -> Self {
                $Name { $($field: $default,)* }
            }
        }
    };
}
pub(super) use settings;

/// An error unless a setting is a number from 0.
pub(super) fn at_least_zero(optimizer: &str, setting: &'static str, x: f64) -> Result<()> {
    within(optimizer, setting, x, x >= 0.0 && x.is_finite(), "a number that is at least 0")
}

/// An error unless a setting is a number from 0 to below 1.
pub(super) fn below_one(optimizer: &str, setting: &'static str, x: f64) -> Result<()> {
    within(optimizer, setting, x, (0.0..1.0).contains(&x), "a number from 0 to below 1")
}

/// An error unless both decay rates are numbers from 0 to below 1.
pub(super) fn check_betas(optimizer: &str, (first, second): (f64, f64)) -> Result<()> {
    below_one(optimizer, "betas", first)?;
    below_one(optimizer, "betas", second)
}

/// An error with what is needed unless a setting is right.
pub(super) fn within(optimizer: &str, setting: &'static str, x: f64, right: bool, needed: &str) -> Result<()> {
    match right {
        true => Ok(()),
        false => Err(ErrorKind::Optimizer.error(setting, x, needed, format!("correct `{setting}` of {optimizer}"))),
    }
}
