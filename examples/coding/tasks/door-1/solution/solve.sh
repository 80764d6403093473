maybe
