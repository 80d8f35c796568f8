//! Fourier transforms with a real result, and windows.

use super::calls::calls;

calls! {}
