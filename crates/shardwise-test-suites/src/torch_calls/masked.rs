//! Reductions and normalizations of the elements that a mask selects, `torch.masked`.

use super::calls::calls;

calls! {}
