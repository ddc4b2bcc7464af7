"""Small tools that several rooms need and that know none of them."""
