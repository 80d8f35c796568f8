//! Special functions of `torch.special`.

use super::calls::calls;

calls! {}
