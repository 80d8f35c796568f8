//! Declaration and checks of hyperparameters.

use crate::error::{ErrorKind, Result};

/// Declares an optimizer with its hyperparameters and their defaults.
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

/// Checks that a setting is a finite number of at least 0.
pub(super) fn at_least_zero(optimizer: &str, setting: &'static str, x: f64) -> Result<()> {
    within(optimizer, setting, x, x >= 0.0 && x.is_finite(), "a number that is at least 0")
}

/// Checks that a setting is from 0 to below 1.
pub(super) fn below_one(optimizer: &str, setting: &'static str, x: f64) -> Result<()> {
    within(optimizer, setting, x, (0.0..1.0).contains(&x), "a number from 0 to below 1")
}

/// Checks that both decay rates are from 0 to below 1.
pub(super) fn check_betas(optimizer: &str, (first, second): (f64, f64)) -> Result<()> {
    below_one(optimizer, "betas", first)?;
    below_one(optimizer, "betas", second)
}

/// An error with what is needed, unless the setting is valid.
pub(super) fn within(optimizer: &str, setting: &'static str, x: f64, is_valid: bool, needed: &str) -> Result<()> {
    match is_valid {
        true => Ok(()),
        false => Err(ErrorKind::Optimizer.error(setting, x, needed, format!("correct `{setting}` of {optimizer}"))),
    }
}
